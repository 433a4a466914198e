"""From measured runs to a report, without an engine; and the whole evaluation in one call."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from speculators_core.errors import EvaluationError
from speculators_core.evaluation.config import EvaluationConfig
from speculators_core.evaluation.lossless import judge
from speculators_core.evaluation.plots import write_plots
from speculators_core.evaluation.records import (
    Baseline,
    Measurement,
    read_baseline,
    read_measurement,
    read_speed,
)
from speculators_core.evaluation.report import (
    Acceptance,
    EvaluationReport,
    Group,
    Lossless,
    PromptCounts,
    Speed,
    write_report,
)
from speculators_core.evaluation.statistics import acceptance_length, al_by_k, ratio_interval
from speculators_core.types import StrictModel


def compare(
    baseline: Path | None, measurement: Path, config: EvaluationConfig, output: Path, *, speed: Path | None = None
) -> EvaluationReport:
    """Turn the directories of measured runs into report.json, report.md, per_prompt.jsonl and plots in `output`.

    Args:
        baseline: of the same verifier, runtime and prompts; None leaves losslessness and speed unknown.
        speed: of the same draft, verifier and runtime with alternating arms, beside the two runs' own speeds.

    Raises: EvaluationError where the two runs do not belong together.
    """
    measured = read_measurement(measurement)
    alone = None if baseline is None else read_baseline(baseline)
    if alone is not None:
        _require_one_world(alone, measured)
    alternating = None if speed is None else read_speed(speed)
    if alternating is not None:
        _require_same(alternating.identity, measured.identity, ("draft", "verifier_fingerprint", "runtime_key"))
    report = EvaluationReport(
        identity=measured.identity,
        measured_by=measured.measured_by,
        acceptance=summarise(measured, config),
        lossless=None if alone is None else _lossless(alone, measured, config),
        speed=None if alone is None else _speed(alone, measured),
        alternating=() if alternating is None else alternating.speeds,
        config=config,
        seconds=sum(run.seconds + run.engine_seconds for run in (alone, measured) if run is not None),
        per_prompt=measured.per_prompt,
    )
    write_report(report, output)
    write_plots(report, output)
    return report


def summarise(measured: Measurement, config: EvaluationConfig) -> Acceptance:
    """Acceptance with intervals, per position, per K, by domain and without loops."""
    rows = measured.per_prompt
    kept = [row for row in rows if row.repeated_share <= config.loop_share]
    whole = _group("all", rows, config)
    drafts = [row.drafts for row in rows]
    per_position = np.array([row.accepted_per_position for row in rows])
    return Acceptance(
        k=measured.k,
        al=1 + measured.accepted / measured.drafts,
        interval=whole.interval,
        per_position=tuple(count / measured.drafts for count in measured.accepted_per_position),
        drafts=measured.drafts,
        accepted=measured.accepted,
        prompts=len(rows),
        tokens=measured.tokens,
        by_k=al_by_k(drafts, per_position),
        by_domain=tuple(
            _group(name, [row for row in rows if row.domain == name], config)
            for name in sorted({row.domain for row in rows})
        ),
        loops=len(rows) - len(kept),
        without_loops=_group("without loops", kept, config),
    )


def _group(name: str, rows: Sequence[PromptCounts], config: EvaluationConfig) -> Group:
    drafts, accepted = [row.drafts for row in rows], [row.accepted for row in rows]
    interval = None
    if len(rows) > 1:
        interval = ratio_interval(
            drafts, accepted, confidence=config.confidence, resamples=config.resamples, seed=config.seed
        )
    return Group(
        name=name,
        prompts=len(rows),
        drafts=sum(drafts),
        accepted=sum(accepted),
        al=acceptance_length(drafts, accepted),
        interval=interval,
    )


def _lossless(alone: Baseline, measured: Measurement, config: EvaluationConfig) -> Lossless | None:
    if measured.divergences is None:
        return None
    return judge(
        measured.divergences,
        alone.divergences,
        prompts=measured.count,
        baseline_prompts=alone.repeated,
        tie_gap=config.tie_gap,
    )


def _speed(alone: Baseline, measured: Measurement) -> Speed:
    return Speed(
        with_=measured.tokens_per_second,
        without=alone.tokens_per_second,
        ratio=measured.tokens_per_second / alone.tokens_per_second,
        concurrency=measured.concurrency,
        arms="one run each, one engine after the other",
    )


def _require_one_world(alone: Baseline, measured: Measurement) -> None:
    _require_same(alone, measured.identity, ("verifier_fingerprint", "runtime_key", "prompts"))
    _require_same(alone, measured, ("max_new_tokens", "concurrency"))


def _require_same(one: StrictModel, other: StrictModel, names: Sequence[str]) -> None:
    for name in names:
        if getattr(one, name) != getattr(other, name):
            raise EvaluationError(
                f"the runs to compare differ in {name.replace('_', ' ')}", mend="measure all of them with one recipe"
            )
