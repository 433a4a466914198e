"""Keep a deployment's draft in step: do what a change asks for, and no more."""

from __future__ import annotations

from flows.retrain import retrain
from speculators_core.config import Recipe
from speculators_core.lifecycle.changes import Action
from tasks import stages
from tasks.policies import pipeline_flow
from tasks.requests import BackfillRequest, UpkeepRequest
from tasks.upkeep import (
    Upkeep,
    decide_now,
    from_random_weights,
    measure_incumbent,
    start_all,
    weights_to_start_from,
)


@pipeline_flow("upkeep", description=__doc__)
def upkeep(recipe: Recipe, action: Action) -> Upkeep:
    """Measure what serves on what is there now; keep it where that is all the change asks for, else train anew."""
    if action == "nothing":
        return Upkeep(action=action, incumbent=None, kept=False, loop=None)
    dataset = stages.prepare(recipe)
    incumbent = measure_incumbent(recipe, dataset.ref)
    if action == "re-evaluate" and incumbent is not None and incumbent.holds:
        return Upkeep(action=action, incumbent=incumbent, kept=True, loop=None)
    if action == "retrain-afresh":
        recipe = from_random_weights(recipe)
    loop = retrain(recipe, weights_to_start_from(recipe, action))
    return Upkeep(action=action, incumbent=incumbent, kept=False, loop=loop)


@pipeline_flow("keep-in-step", description="Bring one deployment's draft in step with its verifier and runtime.")
def keep_in_step(request: UpkeepRequest) -> Upkeep:
    """Do what the request asks for, or what the recipe's table asks for now."""
    recipe, action = decide_now(request)
    return upkeep(recipe, action)


@pipeline_flow("backfill", description="Train a draft for every recipe with every algorithm.", starts_runs=True)
def backfill(request: BackfillRequest) -> list[str]:
    """Start a run for each recipe and algorithm; the pool's limit says how many work at once."""
    return start_all(request)
