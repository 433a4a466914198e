"""The loop's result in one JSON document: what a script reads and the terminal shows as a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from speculators_core.store.files import write_atomic
from speculators_core.types import StrictModel


class StageTime(StrictModel):
    """One stage of the loop."""

    name: str
    seconds: float
    cached: bool


class VerifierSummary(StrictModel):
    """What was served."""

    name: str
    path: str
    fingerprint: str


class RuntimeSummary(StrictModel):
    """What served it."""

    vllm: str


class DraftSummary(StrictModel):
    """The draft, as `vllm serve` loads it."""

    algorithm: str
    path: str
    digest: str


class AcceptanceSummary(StrictModel):
    """Acceptance; al = 1 + accepted / drafts."""

    measured_by: str = Field(description="what counted: engine, or reference where it could not serve the draft")
    k: int
    al: float
    interval: tuple[float, float]
    per_position: tuple[float, ...]
    drafts: int
    accepted: int
    prompts: int
    tokens: int


class LosslessSummary(StrictModel):
    """Replies with the draft against replies without it, greedy."""

    prompts: int
    identical: int


class SpeedSummary(StrictModel):
    """tokens/s with and without the draft at the stated concurrency."""

    with_draft: float = Field(serialization_alias="with")
    without: float
    concurrency: int
    arms: str = Field(description="how the two arms were run: the cheap figure, or alternating rounds")


class TrainingSummary(StrictModel):
    """What training took, and the acceptance length that it promised."""

    tokens: int
    seconds: float
    eal: float | None


class RegistrySummary(StrictModel):
    """Where the draft is registered."""

    model: str
    version: str | None
    aliases: tuple[str, ...]


class GateSummary(StrictModel):
    """Whether the draft may serve, and why."""

    passed: bool
    outcome: str
    reasons: tuple[str, ...]


class LoopSummary(StrictModel):
    """The whole loop; `report.json` under `<home>/<recipe>/`."""

    recipe: str
    verifier: VerifierSummary
    runtime: RuntimeSummary
    draft: DraftSummary
    acceptance: AcceptanceSummary
    lossless: LosslessSummary | None = Field(description="null: not measured")
    speed: SpeedSummary | None = Field(description="null: not measured")
    training: TrainingSummary | None = Field(description="null: the draft was not trained here")
    registry: RegistrySummary
    gate: GateSummary
    stages: tuple[StageTime, ...]
    seconds: float

    def write(self, path: Path) -> None:
        """Write as JSON, atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        text = self.model_dump_json(indent=2, by_alias=True)
        write_atomic(path, lambda part: part.write_text(text + "\n", encoding="utf-8"))


def rows(summary: LoopSummary) -> Sequence[tuple[str, str]]:
    """Label and value pairs for a table on the terminal."""
    a, s, lossless, trained = summary.acceptance, summary.speed, summary.lossless, summary.training
    low, high = a.interval
    by = "" if a.measured_by == "engine" else f"; by the {a.measured_by} loop, not served"
    cached = sum(stage.cached for stage in summary.stages)
    found: list[tuple[str, str]] = [
        ("verifier", f"{summary.verifier.name}  {summary.verifier.fingerprint[:12]}"),
        ("runtime", f"vLLM {summary.runtime.vllm}"),
        ("draft", f"{summary.draft.algorithm}  {summary.draft.path}"),
        (
            "acceptance length",
            f"{a.al:.3f}  (95 % interval {low:.3f} to {high:.3f}) at K = {a.k}, {a.prompts} prompts{by}",
        ),
        ("by position", "  ".join(f"{rate:.3f}" for rate in a.per_position)),
        (
            "identical replies",
            "not measured"
            if lossless is None
            else f"{lossless.identical} of {lossless.prompts}; rounding parts others, see the gate",
        ),
        (
            "tokens/s",
            "not measured"
            if s is None
            else f"{s.with_draft:.0f} with, {s.without:.0f} without, {s.concurrency} requests at once; {s.arms}",
        ),
        ("training", "elsewhere" if trained is None else f"{trained.tokens:,} tokens in {trained.seconds:.0f} s"),
        ("registered", f"{summary.registry.model} version {summary.registry.version or '-'}  {list_aliases(summary)}"),
        ("gate", "\n".join((summary.gate.outcome, *summary.gate.reasons))),
        ("took", f"{summary.seconds:.0f} s, {cached} of {len(summary.stages)} stages cached"),
    ]
    return found


def list_aliases(summary: LoopSummary) -> str:
    """Aliases in brackets, or nothing."""
    return f"[{', '.join(summary.registry.aliases)}]" if summary.registry.aliases else ""


def load(path: Path) -> dict[str, Any]:
    """A written summary, as plain JSON."""
    import json

    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content
