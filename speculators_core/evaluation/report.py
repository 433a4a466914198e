"""The report of an evaluation: what `report.json`, `per_prompt.jsonl` and `report.md` hold.

Counts and ids only: no prompt, reply or token of a conversation is in a report, so that it may be
uploaded wherever a registry keeps it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, Field, ValidationError

from speculators_core.errors import EvaluationError
from speculators_core.evaluation.config import EvaluationConfig
from speculators_core.evaluation.statistics import Interval
from speculators_core.types import StrictModel

SCHEMA_VERSION = 1
MeasuredBy = Literal["engine", "reference"]


class PromptCounts(StrictModel):
    """What one prompt's reply cost and gained; accepted_per_position has K entries."""

    id: str
    domain: str
    tokens: int
    drafts: int
    accepted: int
    accepted_per_position: tuple[int, ...]
    repeated_share: float
    identical: bool | None = None


class Group(StrictModel):
    """Acceptance over some of the prompts; `interval` is None for fewer than two prompts."""

    name: str
    prompts: int
    drafts: int
    accepted: int
    al: float
    interval: Interval | None


class Acceptance(StrictModel):
    """AL = 1 + accepted / drafts, from the engine's counters.

    per_position[i]: share of drafts whose position i was accepted (unconditional, so they add up to AL − 1) ·
    by_k[i]: AL that K = i + 1 would reach, from this run · tokens: generated in the counted run.
    """

    k: int
    al: float
    interval: Interval | None
    per_position: tuple[float, ...]
    drafts: int
    accepted: int
    prompts: int
    tokens: int
    by_k: tuple[float, ...]
    by_domain: tuple[Group, ...]
    loops: int
    without_loops: Group


class Divergence(StrictModel):
    """First token at which two greedy replies to one prompt part.

    gap: distance in nats between the two tokens' logits after their common prefix (None: one of them is not among
    the engine's few best, so this is no tie) · top2_gap: distance of the best two logits there.
    """

    id: str
    position: int
    gap: float | None
    top2_gap: float | None


class Lossless(StrictModel):
    """Replies with and without speculation at temperature 0, against two runs without it.

    holds: every divergence is a tie within `tie_gap`, and the identical share is not shown to be lower than that of
    the two baseline runs (`shortfall_p`: one-sided Fisher exact test; below 0.001 would show it).
    """

    prompts: int
    identical: int
    baseline_prompts: int
    baseline_identical: int
    shortfall_p: float
    tie_gap: float
    divergences: tuple[Divergence, ...]
    baseline_divergences: tuple[Divergence, ...]
    holds: bool


class Speed(StrictModel):
    """Generated tokens per second with and without the draft, client side, at one concurrency."""

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    with_: float = Field(alias="with", description="tokens/s with the draft")
    without: float = Field(description="tokens/s without")
    ratio: float = Field(description="with / without")
    concurrency: int
    arms: str = Field(description="how the two arms were run")
    rounds: tuple[tuple[float, float], ...] = Field(
        default=(), description="tokens/s (with, without) of each alternating round; empty: one run each"
    )


class Identity(StrictModel):
    """What was measured, by digests: two reports compare only where verifier, runtime and prompts agree."""

    draft: str
    verifier_fingerprint: str
    runtime_key: str
    vllm: str
    prompts: str


class EvaluationReport(StrictModel):
    """Everything that a gate or a reader needs of one draft on one verifier and runtime.

    measured_by: the engine, or the reference loop, which stands in where the engine cannot serve the draft.

    speed: of the two counted runs, one engine after the other: cheap, and blind to a machine that drifts ·
    alternating: by alternating arms, one entry for each concurrency; empty unless the gate requires speed.
    """

    schema_version: int = SCHEMA_VERSION
    identity: Identity
    measured_by: MeasuredBy = "engine"
    acceptance: Acceptance
    lossless: Lossless | None
    speed: Speed | None
    alternating: tuple[Speed, ...] = ()
    config: EvaluationConfig
    seconds: float
    per_prompt: tuple[PromptCounts, ...] = Field(default=(), exclude=True)

    @property
    def measured_in_words(self) -> str:
        """What counted, as a reader is told."""
        if self.measured_by == "engine":
            return f"vLLM {self.identity.vllm}"
        return f"the reference loop, not served: vLLM {self.identity.vllm} was not asked"

    @property
    def told_speed(self) -> Speed | None:
        """The one figure to show: the worst of the alternating ones where there are any, else the cheap one."""
        return min(self.alternating, key=lambda speed: speed.ratio) if self.alternating else self.speed


def write_report(report: EvaluationReport, output: Path) -> None:
    """Write report.json, per_prompt.jsonl and report.md into `output`; report.json last."""
    output.mkdir(parents=True, exist_ok=True)
    write_jsonl(output / "per_prompt.jsonl", report.per_prompt)
    write_text(output / "report.md", to_markdown(report))
    write_text(output / "report.json", report.model_dump_json(indent=2) + "\n")


def read_report(directory: Path) -> EvaluationReport:
    """Read a report with its per-prompt counts.

    Raises: EvaluationError where the files are missing or of another schema.
    """
    try:
        report = EvaluationReport.model_validate_json((directory / "report.json").read_text())
        return report.model_copy(update={"per_prompt": read_jsonl(directory / "per_prompt.jsonl")})
    except (OSError, ValidationError) as error:
        raise EvaluationError(
            f"{directory} holds no readable evaluation report: {error}", mend="run the evaluation again"
        ) from error


def write_jsonl(path: Path, rows: Sequence[StrictModel]) -> None:
    """One JSON object a line."""
    write_text(path, "".join(row.model_dump_json() + "\n" for row in rows))


def read_jsonl(path: Path) -> tuple[PromptCounts, ...]:
    """The per-prompt counts that `write_jsonl` wrote."""
    return tuple(PromptCounts.model_validate(json.loads(line)) for line in path.read_text().splitlines() if line)


def write_text(path: Path, text: str) -> None:
    """Write and rename, so that a reader sees the whole file or none."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


def to_markdown(report: EvaluationReport) -> str:
    """The report as Markdown, for a terminal, a run's page or a model card."""
    acceptance = report.acceptance
    lines = [
        "# Evaluation",
        "",
        f"**Acceptance length {acceptance.al:.3f}** at K = {acceptance.k}{_interval(acceptance.interval)} on "
        f"{acceptance.prompts} prompts (temperature 0, {report.measured_in_words}); without looping replies "
        f"{acceptance.without_loops.al:.3f}{_interval(acceptance.without_loops.interval)} "
        f"({acceptance.loops} of {acceptance.prompts} replies loop).",
        "",
        f"{acceptance.drafts} drafts, {acceptance.accepted} accepted tokens, {acceptance.tokens} generated tokens.",
        "",
        "| position | accepted | AL with K up to here |",
        "|---:|---:|---:|",
    ]
    pairs = zip(acceptance.per_position, acceptance.by_k, strict=True)
    lines += [f"| {i} | {rate:.1%} | {al:.3f} |" for i, (rate, al) in enumerate(pairs, 1)]
    lines += ["", "| domain | prompts | AL | interval |", "|---|---:|---:|---|"]
    lines += [f"| {g.name} | {g.prompts} | {g.al:.3f} |{_interval(g.interval)} |" for g in acceptance.by_domain]
    if report.lossless is not None:
        lines += ["", *_lossless_lines(report.lossless)]
    for speed in report.alternating or (() if report.speed is None else (report.speed,)):
        lines += [
            "",
            f"Speed at {speed.concurrency} requests at once ({speed.arms}): {speed.with_:.0f} tokens/s with the draft, "
            f"{speed.without:.0f} without ({speed.ratio:.2f}×).",
        ]
    return "\n".join(lines) + "\n"


def _lossless_lines(lossless: Lossless) -> list[str]:
    verdict = "holds" if lossless.holds else "**does not hold**"
    lines = [
        f"Lossless {verdict}: {lossless.identical} of {lossless.prompts} replies are identical with and without "
        f"speculation; two runs without it agree on {lossless.baseline_identical} of {lossless.baseline_prompts}."
    ]
    if lossless.divergences:
        gaps = [gap.gap for gap in lossless.divergences if gap.gap is not None]
        worst = f"{max(gaps):.3f}" if gaps else "unknown"
        lines.append(
            f"First divergences: {len(lossless.divergences)}; widest logit gap {worst} (tie: {lossless.tie_gap})."
        )
    return lines


def _interval(interval: Interval | None) -> str:
    return "" if interval is None else f" [{interval.low:.3f}, {interval.high:.3f}]"
