"""What the deployed flows are asked: the typed forms of Prefect's pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from speculators_core import registry
from speculators_core.config import Recipe, load_recipe
from speculators_core.lifecycle.changes import Action
from speculators_core.types import StrictModel

_PLACES = {
    "epochs": "training.epochs",
    "max_steps": "training.max_steps",
    "learning_rate": "training.optimizer.learning_rate",
    "seed": "training.seed",
    "max_rows": "data.max_rows",
    "max_length": "data.max_length",
    "draft_vocabulary": "draft_vocabulary",
    "drafted_tokens": "evaluation.k",
    "al_floor": "gate.al_floor",
    "margin": "gate.margin",
    "runtime_python": "runtime.python",
}


class Overrides(StrictModel):
    """Keys of the recipe that are set otherwise for this run; empty ones stay as the recipe has them."""

    epochs: int | None = Field(None, ge=1, description="passes over the training rows")
    max_steps: int | None = Field(None, ge=1, description="optimiser steps after which training ends")
    learning_rate: float | None = Field(None, gt=0, description="peak learning rate")
    seed: int | None = Field(None, ge=0, description="seed of weights, packing and every draw of training")
    max_rows: int | None = Field(None, ge=1, description="conversations kept")
    max_length: int | None = Field(None, ge=8, description="longest row in tokens")
    draft_vocabulary: int | None = Field(None, ge=1, description="size of the draft's vocabulary")
    drafted_tokens: int | None = Field(None, ge=1, description="K: tokens drafted at once when it is measured")
    al_floor: float | None = Field(None, ge=1, description="least acceptance length that the gate accepts")
    margin: float | None = Field(None, ge=0, lt=1, description="tolerated relative loss of AL to the incumbent")
    runtime_python: str | None = Field(None, description="interpreter of the vLLM to run")
    further: list[str] = Field(default_factory=list, description="any other key, as section.key=value")

    @field_validator("further")
    @classmethod
    def _assignments(cls, value: list[str]) -> list[str]:
        for item in value:
            if not item.partition("=")[1]:
                raise ValueError(f"{item!r} is not of the form section.key=value")
        return value

    def assignments(self) -> list[str]:
        """As `--set` takes them."""
        set_here = self.model_dump(exclude_none=True, exclude={"further"})
        return [*(f"{_PLACES[name]}={value}" for name, value in set_here.items()), *self.further]


class UpkeepRequest(StrictModel):
    """Keep one deployment in step with its verifier and runtime."""

    recipe: str = Field(description="recipe file, as the worker finds it")
    action: Action | Literal["auto"] = Field("auto", description="auto: whatever the recipe's table asks for now")
    overrides: Overrides = Field(default_factory=Overrides, description="keys set otherwise for this run")
    expected: str | None = Field(
        None, description="fingerprint that this run is for: where the verifier is another by now, nothing is done"
    )
    expected_runtime: str | None = Field(
        None, description="key of the runtime that this run is for: where that is another by now, nothing is done"
    )

    def load(self) -> Recipe:
        """The recipe with its overrides. ConfigError where either is wrong."""
        return load_recipe(Path(self.recipe), self.overrides.assignments())


class BackfillRequest(StrictModel):
    """Train a draft for every recipe (each has one verifier) with every algorithm."""

    recipes: list[str] = Field(min_length=1, description="recipe files, as the worker finds them")
    algorithms: list[str] = Field(
        default_factory=list, description="kinds of algorithm with their default knobs; empty: each recipe's own"
    )
    overrides: Overrides = Field(default_factory=Overrides, description="keys set otherwise in every run")

    @field_validator("algorithms")
    @classmethod
    def _known(cls, value: list[str]) -> list[str]:
        if unknown := sorted(set(value) - set(registry.names())):
            raise ValueError(f"no such algorithm: {', '.join(unknown)}; known: {', '.join(sorted(registry.names()))}")
        return value

    def requests(self) -> list[UpkeepRequest]:
        """One request for each recipe and algorithm; a recipe's name gets the algorithm's behind it."""
        found: list[UpkeepRequest] = []
        for recipe in self.recipes:
            kinds: list[str | None] = [*self.algorithms] if self.algorithms else [None]
            for kind in kinds:
                values: dict[str, Any] = self.overrides.model_dump()
                if kind is not None:
                    name = load_recipe(Path(recipe)).name
                    values["further"] = [*self.overrides.further, f"algorithm={{kind: {kind}}}", f"name={name}-{kind}"]
                found.append(UpkeepRequest(recipe=recipe, action="retrain-afresh", overrides=Overrides(**values)))
        return found
