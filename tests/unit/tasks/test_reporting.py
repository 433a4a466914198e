"""What a report shows of its recipe."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from speculators_core.config import load_recipe
from tasks.reporting import resolved

RECIPES = Path(__file__).parents[3] / "deployments" / "recipes"


def test_secrets_in_a_recipe_are_not_shown() -> None:
    recipe = load_recipe(
        RECIPES / "demo.yaml",
        [
            "runtime={url: 'http://gpu:8000', api_key_variable: GPU_KEY}",
            "capture={backend: s3, backend_config: {root: 's3://b/p', endpoint_url: 'http://me:hunter2@s3:9000'}}",
            "serve.engine.extra_args=['--api-key', 'hunter3', '--seed', '4']",
        ],
    )
    shown = resolved(recipe)
    assert "hunter" not in shown
    found = yaml.safe_load(shown)
    assert found["capture"]["backend_config"]["endpoint_url"] == "http://[redacted]@s3:9000"
    assert found["runtime"]["api_key_variable"] == "GPU_KEY"
    assert found["serve"]["engine"]["extra_args"] == ["--api-key", "[redacted]", "--seed", "4"]


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_all_else_is_shown(path: Path) -> None:
    recipe = load_recipe(path)
    assert yaml.safe_load(resolved(recipe)) == recipe.model_dump(mode="json")
