"""The loop's stages as Prefect tasks: a name, a retry policy, then one call.

Each attempt that does work is a child run in MLflow; a stage found in the store is only noted. Results are small
JSON references.
"""

from __future__ import annotations

import threading
from dataclasses import replace

from prefect import unmapped

from speculators_core import stages
from speculators_core.config import Recipe
from speculators_core.convert.options import ConvertOptions
from speculators_core.errors import Interrupted
from speculators_core.run import Run, StageResult, WarmStart
from speculators_core.types import ArtifactRef
from tasks.adapters.settings import settings
from tasks.observe import observed
from tasks.policies import stage_task


@stage_task("preflight", retries=1)
def preflight(recipe: Recipe, warm_start: WarmStart | None = None) -> StageResult:
    """The gate can be reached, and an untrained draft of this shape is loaded by the real runtime."""
    stages.require_likely_prompts(Run(recipe, settings().home))
    return observed(recipe, "preflight", lambda run: stages.preflight(replace(run, warm_start=warm_start)))


@stage_task("convert", retries=0)
def convert(recipe: Recipe, source: str, options: ConvertOptions) -> StageResult:
    """A draft that somebody else trained becomes one of ours."""
    return observed(recipe, "convert", lambda run: stages.convert(run, source, options))


@stage_task("preflight", retries=1)
def preflight_draft(recipe: Recipe, draft: ArtifactRef) -> StageResult:
    """The gate can be reached, and a finished draft is loaded by the real runtime, before it is measured."""
    stages.require_likely_prompts(Run(recipe, settings().home))
    return observed(recipe, "preflight", lambda run: stages.preflight_draft(run, draft))


@stage_task("prepare")
def prepare(recipe: Recipe) -> StageResult:
    """Conversations become token rows with loss masks."""
    return observed(recipe, "prepare", stages.prepare, files=("report.json",))


@stage_task("capture")
def capture(recipe: Recipe, dataset: ArtifactRef) -> StageResult:
    """The verifier's hidden states at every token of every row."""
    return observed(recipe, "capture", lambda run: stages.capture(run, dataset))


_given_up = threading.Event()
"""Whether the flow has left: Prefect waits for the threads of a mapped task, and cannot stop them."""


@stage_task("capture-share")
def capture_share(recipe: Recipe, dataset: ArtifactRef, number: int) -> int:
    """One engine's part of a capture: rows captured now. What it leaves undone, `capture` does."""

    def look() -> None:
        if _given_up.is_set():
            raise Interrupted("the capture was stopped", mend="run the same command again: it goes on")

    return stages.capture_share(Run(recipe, settings().home), dataset, number, look)


def captured(recipe: Recipe, dataset: ArtifactRef) -> StageResult:
    """The capture; where the recipe has several engines, they do its parts first, at once."""
    if shares := stages.missing_shares(Run(recipe, settings().home), dataset):
        _given_up.clear()
        try:
            capture_share.map(unmapped(recipe), unmapped(dataset), list(shares)).wait()
        except BaseException:
            _given_up.set()
            raise
    return capture(recipe, dataset)


@stage_task("train", retries=1)
def train(recipe: Recipe, states: ArtifactRef, warm_start: WarmStart | None = None) -> StageResult:
    """A draft trained on the states; its metrics reach MLflow while it trains."""
    return observed(
        recipe,
        "train",
        lambda run: stages.train(replace(run, warm_start=warm_start), states),
        follow="metrics.jsonl",
    )


@stage_task("export", retries=0)
def export(recipe: Recipe, training: ArtifactRef) -> StageResult:
    """The best checkpoint as vLLM loads it."""
    return observed(recipe, "export", lambda run: stages.export(run, training))


@stage_task("evaluate")
def evaluate(recipe: Recipe, draft: ArtifactRef, dataset: ArtifactRef) -> StageResult:
    """Acceptance, losslessness and speed on the real engine."""
    return observed(
        recipe,
        "evaluate",
        lambda run: stages.evaluate_exported(run, draft, dataset),
        files=("report.json", "report.md", "*.png", "per_prompt.jsonl"),
    )
