"""A draft that somebody else trained: converted, served, measured, registered, and judged like one of our own."""

from __future__ import annotations

import time

from speculators_core.config import Recipe
from speculators_core.convert.options import ConvertOptions
from speculators_core.stages import require_prompts
from speculators_core.summary import LoopSummary
from tasks import stages
from tasks.approval import approved
from tasks.policies import pipeline_flow
from tasks.release import promote, register, summarise


@pipeline_flow("adopt", description=__doc__)
def adopt(recipe: Recipe, source: str, options: ConvertOptions) -> LoopSummary:
    """Convert the draft, see that it is served, measure it on held-back prompts, register it, and ask the gate."""
    started = time.monotonic()
    draft = stages.convert(recipe, source, options)
    checked = stages.preflight_draft(recipe, draft.ref)
    dataset = require_prompts(recipe, stages.prepare(recipe))
    evaluation = stages.evaluate(recipe, draft.ref, dataset.ref)
    version = register(recipe, draft.ref, evaluation.ref)
    judged = promote(recipe, version, draft.ref, dataset.ref)
    promotion = approved(recipe, version, draft.ref, dataset.ref, judged)
    done = [draft, checked, dataset, evaluation]
    return summarise(recipe, done, version, promotion, time.monotonic() - started)
