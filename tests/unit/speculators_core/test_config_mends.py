"""A value of another form, or a missing key, is answered with what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from speculators_core.config import load_recipe
from speculators_core.errors import ConfigError
from tests.environment import ROOT

DEMO = ROOT / "deployments" / "recipes" / "demo.yaml"


@pytest.mark.parametrize(
    ("override", "mend"),
    [
        ("algorithm=eagle3", "write `algorithm: {kind: eagle3}`"),
        ("data.sources=conversations.jsonl", "write `sources: [conversations.jsonl]`"),
        ("data=conversations.jsonl", "write `data: {sources: [conversations.jsonl]}`"),
        ("hidden_states=online", "write `hidden_states: {mode: online}`"),
        ("verifier=/models/Qwen3-8B", "write `verifier: {path: /models/Qwen3-8B}`"),
        ("runtime=/usr/bin/python3", "write `runtime: {KEY: /usr/bin/python3}`"),
        ("capture.backend_config=s3", "write `backend_config: {KEY: s3}`"),
        ("algorithm=", "write `algorithm: {kind: …}`"),
        ("training.epochs", "write --set training.epochs=VALUE"),
    ],
)
def test_a_value_of_another_form_is_shown_in_the_right_one(override: str, mend: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(DEMO, [override])
    assert caught.value.mend == mend


@pytest.mark.parametrize(
    ("missing", "mend"),
    [
        ("deployment", "write `deployment: …`"),
        ("data", "write `data: {sources: […]}`"),
        ("algorithm", "write `algorithm: {kind: …}`"),
    ],
)
def test_a_missing_key_is_shown_as_it_would_stand(tmp_path: Path, missing: str, mend: str) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({k: v for k, v in yaml.safe_load(DEMO.read_text()).items() if k != missing}))
    with pytest.raises(ConfigError, match=f"`{missing}` is missing") as caught:
        load_recipe(recipe)
    assert caught.value.mend == mend


def test_an_empty_recipe_is_told_what_it_needs(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("")
    with pytest.raises(
        ConfigError, match="mend: give it name, deployment, verifier, data, algorithm; `draftsmith keys`"
    ):
        load_recipe(recipe)
