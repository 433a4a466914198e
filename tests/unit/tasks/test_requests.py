"""Forms become recipes; what is wrong in them is said before a run starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from speculators_core.errors import ConfigError
from tasks.requests import BackfillRequest, Overrides, UpkeepRequest

RECIPE = Path(__file__).parents[3] / "deployments" / "recipes" / "demo.yaml"


def test_every_override_reaches_its_place() -> None:
    values = {
        "epochs": 3, "max_steps": 50, "learning_rate": 0.5, "seed": 4, "max_rows": 7, "max_length": 99,
        "draft_vocabulary": 512, "drafted_tokens": 2, "al_floor": 1.25, "margin": 0.1, "runtime_python": "x/python",
        "further": ["capture.concurrency=3"],
    }  # fmt: skip
    assert set(values) == set(Overrides.model_fields)
    recipe = UpkeepRequest(recipe=str(RECIPE), overrides=Overrides.model_validate(values)).load()
    found = (
        recipe.training.epochs, recipe.training.max_steps, recipe.training.optimizer.learning_rate,
        recipe.training.seed, recipe.data.max_rows, recipe.data.max_length, recipe.draft_vocabulary,
        recipe.evaluation.k, recipe.gate.al_floor, recipe.gate.margin, recipe.runtime.python,
        recipe.capture.concurrency,
    )  # fmt: skip
    assert found == (3, 50, 0.5, 4, 7, 99, 512, 2, 1.25, 0.1, "x/python", 3)


def test_an_empty_form_is_the_recipe_as_it_is() -> None:
    assert Overrides().assignments() == []


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(ValidationError, match=r"section\.key=value"):
        Overrides(further=["epochs"])
    with pytest.raises(ValidationError, match="no such algorithm: telepathy"):
        BackfillRequest(recipes=[str(RECIPE)], algorithms=["telepathy"])
    with pytest.raises(ConfigError, match="no recipe at"):
        UpkeepRequest(recipe="nowhere.yaml").load()


def test_a_backfill_is_every_recipe_with_every_algorithm() -> None:
    asked = BackfillRequest(recipes=[str(RECIPE), str(RECIPE)], algorithms=["eagle3", "peagle"]).requests()
    loaded = [request.load() for request in asked]
    assert [(recipe.name, recipe.algorithm) for recipe in loaded[:2]] == [
        ("demo-eagle3", {"kind": "eagle3"}),
        ("demo-peagle", {"kind": "peagle"}),
    ]
    assert len(loaded) == 4 and {request.action for request in asked} == {"retrain-afresh"}
    (own,) = BackfillRequest(recipes=[str(RECIPE)]).requests()
    assert own.load().name == "demo"
