"""A draft on the real engine: the verifier alone, with the draft, their speed by turns, and the report of all that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speculators_core.data.rows import RowSet
from speculators_core.provenance import versions
from speculators_core.run import Run, StageResult, produce, together
from speculators_core.stages.draft import preflight
from speculators_core.stages.versions import VERSIONS
from speculators_core.store import input_digest
from speculators_core.types import ArtifactRef, Json

if TYPE_CHECKING:
    from speculators_core.evaluation.report import EvaluationReport, MeasuredBy
    from speculators_core.evaluation.runs import Conditions


def evaluate_exported(run: Run, draft: ArtifactRef, dataset: ArtifactRef) -> StageResult:
    """`evaluate` for a draft of our own store."""
    return evaluate(run, run.store.path(draft), draft.digest, dataset)


def evaluate(run: Run, draft_dir: Path, digest: str, dataset: ArtifactRef) -> StageResult:
    """Acceptance, losslessness and speed of a draft, as a report with plots; acceptance alone by the reference loop."""
    if measured_by(run) == "reference":
        parts = {"measurement": measure_by_reference(run, draft_dir, digest, dataset)}
    else:
        parts = {"measurement": measure(run, draft_dir, digest, dataset)}
        if has_baseline(run):
            parts["baseline"] = baseline(run, dataset)
        if has_baseline(run) and run.recipe.gate.speed == "require":
            parts["speed"] = time_arms(run, draft_dir, digest, dataset)
    inputs = {name: part.ref.digest for name, part in parts.items()}
    settings = {"config": run.recipe.evaluation.model_dump(mode="json")}
    key = input_digest("evaluate", VERSIONS["evaluation"], {**inputs, **settings})

    def build(workspace: Path) -> dict[str, Any]:
        from speculators_core.evaluation.compare import compare

        paths = {name: run.store.path(part.ref) for name, part in parts.items()}
        report = compare(
            paths.get("baseline"), paths["measurement"], run.recipe.evaluation, workspace, speed=paths.get("speed")
        )
        told = {"identity", "measured_by", "acceptance", "lossless", "speed", "alternating"}
        return report.model_dump(mode="json", include=told)

    result = produce(run, "evaluate", "evaluation", key, inputs, build, settings=settings)
    return together(result, (*parts.values(), result))


def baseline(run: Run, dataset: ArtifactRef) -> StageResult:
    """The verifier alone on the held-back prompts: what a draft's output and speed are held against."""
    inputs = measured_with(run, dataset)
    settings = {"config": run.recipe.evaluation.run_inputs(speculation=False)}
    key = input_digest("baseline", VERSIONS["baseline"], {**inputs, **settings})

    def build(workspace: Path) -> dict[str, Any]:
        from speculators_core.evaluation.measure import measure_baseline

        found = measure_baseline(conditions(run, dataset), workspace)
        return {"tokens_per_second": found.tokens_per_second, "prompts": found.count, "tokens": found.tokens}

    return produce(run, "baseline", "baseline", key, inputs, build, settings=settings)


def measure(run: Run, draft_dir: Path, digest: str, dataset: ArtifactRef) -> StageResult:
    """A draft on the held-back prompts: what the engine counted. `digest` names the draft's bytes."""
    alone = baseline(run, dataset) if has_baseline(run) else None
    inputs = {**measured_with(run, dataset), "draft": digest}
    settings = {"config": run.recipe.evaluation.run_inputs(speculation=True)}
    key = input_digest("measure", VERSIONS["measurement"], {**inputs, **settings})

    def build(workspace: Path) -> dict[str, Any]:
        from speculators_core.evaluation.measure import measure_draft

        known = None if alone is None else run.store.path(alone.ref)
        found = measure_draft(draft_dir, conditions(run, dataset), workspace, baseline=known)
        return {"k": found.k, "al": 1 + found.accepted / found.drafts, "prompts": found.count, "tokens": found.tokens}

    return produce(run, "measure", "measurement", key, inputs, build, settings=settings)


def measure_by_reference(run: Run, draft_dir: Path, digest: str, dataset: ArtifactRef) -> StageResult:
    """The same by the reference loop, where no engine serves the draft."""
    inputs = {**measured_with(run, dataset), "draft": digest}
    settings: dict[str, Json] = {
        "config": run.recipe.evaluation.run_inputs(speculation=True),
        "versions": versions("torch", "transformers"),
    }
    key = input_digest("reference", VERSIONS["reference"], {**inputs, **settings})

    def build(workspace: Path) -> dict[str, Any]:
        from speculators_core.evaluation.reference.measuring import measure_reference

        found = measure_reference(draft_dir, conditions(run, dataset), workspace)
        return {"k": found.k, "al": 1 + found.accepted / found.drafts, "prompts": found.count, "tokens": found.tokens}

    return produce(run, "measure", "measurement", key, inputs, build, settings=settings)


def measure_ngram(run: Run, dataset: ArtifactRef) -> StageResult:
    """vLLM's n-gram look-up on the held-back prompts: what can be had without any draft."""
    inputs = measured_with(run, dataset)
    settings = {"config": run.recipe.evaluation.run_inputs(speculation=True)}
    key = input_digest("ngram", VERSIONS["measurement"], {**inputs, **settings})

    def build(workspace: Path) -> dict[str, Any]:
        from speculators_core.evaluation.measure import measure_ngram as measure_look_up

        found = measure_look_up(conditions(run, dataset), workspace)
        return {"k": found.k, "tokens_per_step": found.tokens_per_step, "prompts": found.count, "tokens": found.tokens}

    return produce(run, "ngram", "measurement", key, inputs, build, settings=settings)


def time_arms(run: Run, draft_dir: Path, digest: str, dataset: ArtifactRef) -> StageResult:
    """Speed with and without the draft, the arms alternating: an artifact of its own, since it costs two engines."""
    inputs = {**measured_with(run, dataset), "draft": digest}
    settings = {"config": run.recipe.evaluation.speed_inputs()}
    key = input_digest("speed", VERSIONS["speed"], {**inputs, **settings})

    def build(workspace: Path) -> dict[str, Any]:
        from speculators_core.evaluation.speed import measure_speed

        found = measure_speed(draft_dir, conditions(run, dataset), workspace)
        return {"ratios": {str(speed.concurrency): speed.ratio for speed in found.speeds}}

    return produce(run, "speed", "speed", key, inputs, build, settings=settings)


def read_evaluation(run: Run, evaluation: ArtifactRef) -> EvaluationReport:
    """The report behind an evaluation's reference, with its counts by prompt."""
    from speculators_core.evaluation.report import read_report

    return read_report(run.store.path(evaluation))


def conditions(run: Run, dataset: ArtifactRef) -> Conditions:
    """What every run on the engine has in common, whatever draft it measures."""
    from speculators_core.evaluation.runs import Conditions

    return Conditions(
        verifier_dir=run.verifier,
        verifier_fingerprint=run.fingerprint.digest,
        prompts=RowSet.open(run.store.path(dataset)).prompts(),
        runtime=run.recipe.runtime,
        config=run.recipe.evaluation,
        home=run.home,
        trust_remote_code=run.recipe.verifier.trust_remote_code,
        progress=run.progress,
    )


def measured_with(run: Run, dataset: ArtifactRef) -> dict[str, str]:
    """Inputs of every measurement: prompts, verifier and runtime."""
    return {"dataset": dataset.digest, "verifier": run.fingerprint.digest, "runtime": run.runtime.key}


def measured_by(run: Run) -> MeasuredBy:
    """What counts accepted tokens: as the recipe says, or what pre-flight has seen to be possible."""
    asked = run.recipe.evaluation.measured_by
    if asked != "auto":
        return asked
    if not run.recipe.export.allow_unservable or run.recipe.runtime.url is not None:
        return "engine"  # or it would not have passed pre-flight
    return "reference" if "unservable" in preflight(replace(run, check=False)).summary else "engine"


def has_baseline(run: Run) -> bool:
    """Whether the verifier can be served alone: a server that somebody else runs serves the draft, and only that."""
    return run.recipe.runtime.url is None
