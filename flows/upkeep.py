"""Keep a deployment's draft in step: do what a change asks for, and no more."""

from __future__ import annotations

from flows.retrain import retrain
from speculators_core.config import Recipe
from speculators_core.lifecycle.changes import Action
from tasks import stages
from tasks.policies import pipeline_flow
from tasks.upkeep import Upkeep, measure_incumbent, weights_to_start_from


@pipeline_flow("upkeep", description=__doc__)
def upkeep(recipe: Recipe, action: Action) -> Upkeep:
    """Measure what serves on what is there now; keep it where that is all the change asks for, else train anew."""
    if action == "nothing":
        return Upkeep(action=action, incumbent=None, kept=False, loop=None)
    dataset = stages.prepare(recipe)
    incumbent = measure_incumbent(recipe, dataset.ref)
    if action == "re-evaluate" and incumbent is not None and incumbent.cell.state == "proven":
        return Upkeep(action=action, incumbent=incumbent, kept=True, loop=None)
    loop = retrain(recipe, weights_to_start_from(recipe, action))
    return Upkeep(action=action, incumbent=incumbent, kept=False, loop=loop)
