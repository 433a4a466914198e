"""The report of a candidate: everything that one needs to agree or disagree with the gate, in one document.

Counts, digests and settings only, never a conversation's text: it goes wherever the registry keeps it. `page.py` makes
one HTML page of it, `to_markdown` the same for places that show Markdown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from speculators_core.evaluation.records import Measurement
from speculators_core.evaluation.report import EvaluationReport, Group, Speed
from speculators_core.evaluation.statistics import Interval
from speculators_core.types import StrictModel

ArmName = Literal["candidate", "incumbent", "n-gram", "no speculation"]


class Arm(StrictModel):
    """One way of serving the same prompts. Numbers are None where it was not measured; `note` says why or how."""

    name: ArmName
    label: str
    al: float | None = Field(None, description="1 + accepted / drafts")
    interval: Interval | None = None
    tokens_per_step: float | None = Field(None, description="generated tokens over steps of the verifier")
    tokens_per_second: float | None = None
    per_position: tuple[float, ...] = ()
    domains: tuple[Group, ...] = ()
    note: str = ""


class Curve(StrictModel):
    """A training curve: (step, value)."""

    name: str
    points: tuple[tuple[int, float], ...]


class StageCost(StrictModel):
    """What a stage took when it was made; None where it was not recorded."""

    name: str
    seconds: float | None
    num_bytes: int
    tokens: int | None = None
    price: float | None = None


class PartLine(StrictModel):
    """One part of what the draft is tied to, against the incumbent's; `details` are lines of the difference."""

    name: str
    here: str
    incumbent: str | None
    details: tuple[str, ...] = ()

    @property
    def state(self) -> str:
        """same, changed, or new where there is no incumbent that says."""
        return "new" if self.incumbent is None else "same" if self.incumbent == self.here else "changed"


class CandidateReport(StrictModel):
    """One candidate, its measurements, and the gate's decision."""

    model: str
    version: str
    recipe: str
    algorithm: str
    verifier: str
    vllm: str
    outcome: str
    reasons: tuple[str, ...]
    reported: tuple[str, ...] = Field((), description="what was measured and not gated")
    prompts: int
    k: int
    measured: str = Field(description="what counted: the engine, or the reference loop")
    arms: tuple[Arm, ...]
    speeds: tuple[Speed, ...]
    parts: tuple[PartLine, ...]
    data_card: tuple[tuple[str, str], ...]
    curves: tuple[Curve, ...]
    stages: tuple[StageCost, ...]
    command: str = Field(description="what makes all of this again")
    facts: tuple[tuple[str, str], ...] = Field((), description="digests that pin it")


def arms_of(
    candidate: EvaluationReport,
    incumbent: EvaluationReport | None,
    ngram: Measurement | None,
    *,
    labels: tuple[str, str],
) -> tuple[Arm, ...]:
    """The arms of a comparison, the candidate's first; those that were not measured say so.

    Args:
        labels: of the candidate, and of the incumbent.
    """
    speed = candidate.told_speed
    arms = [_measured("candidate", labels[0], candidate)]
    if incumbent is None:
        arms.append(
            Arm(name="incumbent", label=labels[1], note="nothing else serves: there was nothing to compare with")
        )
    else:
        arms.append(_measured("incumbent", labels[1], incumbent))
    if ngram is None:
        arms.append(
            Arm(name="n-gram", label="n-gram", note="not measured: add `baselines: [ngram]` under `evaluation`")
        )
    else:
        arms.append(
            Arm(
                name="n-gram",
                label="n-gram",
                al=1 + ngram.accepted / ngram.drafts if ngram.drafts else None,
                tokens_per_step=ngram.tokens_per_step,
                tokens_per_second=ngram.tokens_per_second,
                per_position=tuple(n / ngram.drafts for n in ngram.accepted_per_position) if ngram.drafts else (),
                note=f"drafts only where the context repeats: {ngram.drafts} drafts in "
                f"{ngram.tokens - ngram.accepted} steps; its AL speaks of those",
            )
        )
    arms.append(
        Arm(
            name="no speculation",
            label="no speculation",
            al=1.0,
            tokens_per_step=1.0,
            tokens_per_second=None if speed is None else speed.without,
            note="" if speed is not None else "speed was not measured",
        )
    )
    return tuple(arms)


def _measured(name: ArmName, label: str, report: EvaluationReport) -> Arm:
    a, speed = report.acceptance, report.told_speed
    return Arm(
        name=name,
        label=label,
        al=a.al,
        interval=a.interval,
        tokens_per_step=a.tokens / (a.tokens - a.accepted),
        tokens_per_second=None if speed is None else speed.with_,
        per_position=a.per_position,
        domains=a.by_domain,
        note=f"{a.loops} of {a.prompts} replies loop; without them AL {a.without_loops.al:.3f}",
    )


def to_markdown(report: CandidateReport) -> str:
    """The report as Markdown."""
    lines = [
        f"# {report.model} version {report.version}: {report.outcome}",
        "",
        f"{report.algorithm} draft for {report.verifier} on vLLM {report.vllm}, recipe {report.recipe}; "
        f"{report.prompts} prompts, K = {report.k}, temperature 0, counted by {report.measured}.",
        "",
        *(f"- {reason}" for reason in (*report.reasons, *report.reported)),
        "",
        "## Acceptance",
        "",
        *_table(
            ("arm", "AL", "95 % interval", "tokens a step", "tokens/s", ""),
            [
                (
                    arm.label,
                    number(arm.al),
                    span(arm.interval),
                    number(arm.tokens_per_step),
                    number(arm.tokens_per_second, 0),
                    arm.note,
                )
                for arm in report.arms
            ],
        ),
        "",
        *_table(("domain", *(arm.label for arm in _with_domains(report))), domain_rows(report)),
    ]
    if report.speeds:
        lines += [
            "",
            "## Speed",
            "",
            *_table(("requests at once", "with", "without", "ratio", "how"), speed_rows(report)),
        ]
    lines += ["", "## Tied to", "", *_table(("part", "here", "incumbent", "state"), part_rows(report))]
    lines += [f"- {line.name}: {detail}" for line in report.parts for detail in line.details]
    lines += ["", "## Data", "", *_table(("", ""), list(report.data_card))]
    lines += ["", "## Cost", "", *_table(("stage", "seconds", "bytes", "tokens", "price"), cost_rows(report))]
    lines += ["", "## Again", "", "```", report.command, "```", ""]
    return "\n".join(lines)


def domain_rows(report: CandidateReport) -> list[tuple[str, ...]]:
    """One row a domain: name with its prompts, then each measured arm's AL and interval."""
    arms = _with_domains(report)
    names = sorted({group.name for arm in arms for group in arm.domains})
    rows = []
    for name in names:
        found = [next((group for group in arm.domains if group.name == name), None) for arm in arms]
        prompts = next(group.prompts for group in found if group is not None)
        rows.append(
            (f"{name} ({prompts})", *("-" if g is None else f"{g.al:.3f} {span(g.interval)}".strip() for g in found))
        )
    return rows


def speed_rows(report: CandidateReport) -> list[tuple[str, ...]]:
    """One row for each concurrency."""
    return [
        (str(s.concurrency), f"{s.with_:.0f} tokens/s", f"{s.without:.0f} tokens/s", f"{s.ratio:.2f}×", s.arms)
        for s in report.speeds
    ]


def part_rows(report: CandidateReport) -> list[tuple[str, ...]]:
    """One row for each part that the draft is tied to."""
    return [(line.name, short(line.here), short(line.incumbent), line.state) for line in report.parts]


def cost_rows(report: CandidateReport) -> list[tuple[str, ...]]:
    """One row a stage, and their sum."""
    rows = [
        (s.name, number(s.seconds, 0), f"{s.num_bytes:,}", "-" if s.tokens is None else f"{s.tokens:,}",
         number(s.price, 2))
        for s in report.stages
    ]  # fmt: skip
    known = [s.seconds for s in report.stages if s.seconds is not None]
    prices = [s.price for s in report.stages if s.price is not None]
    total = number(sum(prices), 2) if prices else "-"
    return [*rows, ("sum", number(sum(known), 0), f"{sum(s.num_bytes for s in report.stages):,}", "-", total)]


def number(value: float | None, digits: int = 3) -> str:
    """A number, or a dash."""
    return "-" if value is None else f"{value:,.{digits}f}"


def span(interval: Interval | None) -> str:
    """An interval in brackets, or nothing."""
    return "" if interval is None else f"[{interval.low:.3f}, {interval.high:.3f}]"


def short(digest: str | None) -> str:
    """The beginning of a digest; other texts as they are."""
    if digest is None:
        return "-"
    return digest[:12] if len(digest) == 64 and digest.isalnum() else digest


def _with_domains(report: CandidateReport) -> list[Arm]:
    return [arm for arm in report.arms if arm.domains]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    return [line(head), "|" + "---|" * len(head), *(line(row) for row in rows)]
