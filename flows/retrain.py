"""The whole loop: from a verifier and conversations to a promoted draft."""

from __future__ import annotations

import time

from speculators_core.config import Recipe
from speculators_core.run import WarmStart
from speculators_core.stages import require_prompts
from speculators_core.summary import LoopSummary
from tasks import stages
from tasks.approval import approved
from tasks.policies import pipeline_flow
from tasks.release import promote, register, summarise
from tasks.warm_start import recipe_start


@pipeline_flow("retrain", description=__doc__)
def retrain(recipe: Recipe, warm_start: WarmStart | None = None) -> LoopSummary:
    """Check that the draft can be served, capture the verifier, train, export, measure, register, and promote."""
    started = time.monotonic()
    start = warm_start or recipe_start(recipe)
    checked = stages.preflight(recipe, start)
    dataset = require_prompts(recipe, stages.prepare(recipe))
    states = dataset if recipe.hidden_states.streamed else stages.captured(recipe, dataset.ref)
    training = stages.train(recipe, states.ref, start)
    draft = stages.export(recipe, training.ref)
    evaluation = stages.evaluate(recipe, draft.ref, dataset.ref)
    version = register(recipe, draft.ref, evaluation.ref)
    judged = promote(recipe, version, draft.ref, dataset.ref)
    promotion = approved(recipe, version, draft.ref, dataset.ref, judged)
    done = [checked, dataset, states, training, draft, evaluation]
    return summarise(recipe, done, version, promotion, time.monotonic() - started)
