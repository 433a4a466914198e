"""The loop's stages as plain functions: each finds its result in the store or makes it.

    preflight → prepare → capture → train → export → evaluate

A stage's cache key is a digest of its inputs, its configuration, its hand-bumped version and the versions of
vllm, torch and transformers where they matter; never a path, a run id or a commit (decision of the design).
Two processes that ask for the same key compute it once; a killed stage goes on from its workspace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from speculators_core.config import Recipe
from speculators_core.run import Run, StageResult
from speculators_core.stages.adopting import convert, preflight_draft
from speculators_core.stages.draft import export, preflight, train, training_key
from speculators_core.stages.enough import require_likely_prompts
from speculators_core.stages.measuring import (
    baseline,
    evaluate,
    evaluate_exported,
    has_baseline,
    measure,
    measure_ngram,
    read_evaluation,
    time_arms,
)
from speculators_core.stages.shares import capture_share, missing_shares
from speculators_core.stages.states import capture, prepare, regenerate, require_prompts
from speculators_core.stages.versions import VERSIONS

ORDER = ("preflight", "prepare", "capture", "train", "export", "evaluate")


def order_of(recipe: Recipe) -> tuple[str, ...]:
    """The stages that the recipe's loop has: where states are streamed into training, nothing is captured before."""
    return tuple(name for name in ORDER if name != "capture" or not recipe.hidden_states.streamed)


def run_until(run: Run, last: str) -> Iterator[StageResult]:
    """The stages in order, up to and with `last`; each is done when it is yielded. `capture`, asked for, is done."""
    order = order_of(run.recipe) if last != "capture" else ORDER
    source = "capture" if "capture" in order else "prepare"
    results: dict[str, StageResult] = {}
    steps: dict[str, Callable[[], StageResult]] = {
        "preflight": lambda: preflight(run),
        "prepare": lambda: prepare(run),
        "capture": lambda: capture(run, results["prepare"].ref),
        "train": lambda: train(run, results[source].ref),
        "export": lambda: export(run, results["train"].ref),
        "evaluate": lambda: evaluate_exported(run, results["export"].ref, results["prepare"].ref),
    }
    assert tuple(steps) == ORDER
    for name in order[: order.index(last) + 1]:
        results[name] = steps[name]()
        yield results[name]


__all__ = [
    "ORDER",
    "VERSIONS",
    "baseline",
    "capture",
    "capture_share",
    "convert",
    "evaluate",
    "evaluate_exported",
    "export",
    "has_baseline",
    "measure",
    "measure_ngram",
    "missing_shares",
    "order_of",
    "preflight",
    "preflight_draft",
    "prepare",
    "read_evaluation",
    "regenerate",
    "require_likely_prompts",
    "require_prompts",
    "run_until",
    "time_arms",
    "train",
    "training_key",
]
