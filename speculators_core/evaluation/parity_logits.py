"""Draft logits, the third rung of the parity ladder: the engine's drafter against the module that is trained.

A probe in the engine (`hs_connectors.probe`) has written down what its drafter was fed and which logits came out. Here
the same draft directory is loaded into the algorithm's own module and fed the same, and the logits are compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

import torch
from pydantic import Field
from torch import Tensor, nn

from hs_connectors.errors import ConnectorError
from hs_connectors.probe import ProbedStep, follow_requests, read_batches
from speculators_core.errors import EvaluationError
from speculators_core.evaluation.drafts import ServedDraft
from speculators_core.types import Choose, DraftContext, StrictModel

TOLERANCE = {"float32": 1e-3, "float16": 0.01, "bfloat16": 0.03}
"""Largest norm of the difference that one position's logits may have, as a part of the norm of the engine's, by the
engine's dtype. Our side computes in float32; bfloat16 keeps 8 bits, and some ten roundings add up."""
TIE = 4
"""Best two logits nearer than this many root-mean-square differences of their row, as far as these are rounding, count
as a tie."""
_TRIED_STEPS = 6


class PositionParity(StrictModel):
    """Agreement at one place of the draft."""

    position: int = Field(description="1 for the first drafted token")
    compared: int = Field(description="logit rows compared")
    max_abs: float = Field(description="largest absolute difference of any logit")
    relative: float = Field(description="largest norm of a row's difference, over the norm of the engine's row")
    ties: int = Field(description="rows whose best two logits are too near to tell")
    agreed: int = Field(description="rows, ties left out, where both choose the same token")


class LogitParity(StrictModel):
    """Our draft logits against the engine's."""

    algorithm: str = Field(description="the draft's")
    dtype: str = Field(description="dtype that the engine computed in")
    requests: int = Field(description="requests of which steps were replayed")
    steps: int = Field(description="drafting steps replayed")
    tolerance: float = Field(description="largest relative difference that is rounding")
    positions: tuple[PositionParity, ...] = Field(description="by place in the draft")
    same_tokens: bool = Field(description="both sides can propose the same part of the vocabulary")
    same_drafts: int = Field(description="steps in which we propose the engine's tokens, all of them, ties left out")
    tied_steps: int = Field(description="steps with a tie somewhere")
    explained_by: str | None = Field(None, description="knob which, turned the other way, makes the logits agree")

    @property
    def max_abs(self) -> float:
        """Largest absolute difference of any logit."""
        return max(position.max_abs for position in self.positions)

    @property
    def relative(self) -> float:
        """Largest relative difference of any row."""
        return max(position.relative for position in self.positions)

    @property
    def agreement(self) -> float:
        """Share of rows, ties left out, where both choose the same token; NaN when all are ties."""
        judged = sum(position.compared - position.ties for position in self.positions)
        return sum(position.agreed for position in self.positions) / judged if judged else float("nan")

    @property
    def holds(self) -> bool:
        """Differences are rounding, and no choice differs outside ties."""
        return self.same_tokens and self.relative <= self.tolerance and not self.agreement < 1

    def describe(self) -> str:
        """One sentence: the figures, and what is wrong."""
        text = (
            f"relative difference {self.relative:.2g} (at most {self.tolerance:g} in {self.dtype}), absolute "
            f"{self.max_abs:.2g}, same choice in {self.agreement:.1%} outside ties; {self.steps} steps of "
            f"{self.requests} requests"
        )
        if self.holds:
            return text
        if not self.same_tokens:
            return f"{text}; the engine proposes other tokens than the draft's vocabulary holds"
        first = next((p.position for p in self.positions if p.relative > self.tolerance), None)
        if first is not None and first > 1:
            text += f"; first at drafted token {first}: what a step hands to the next one differs"
        if self.explained_by is not None:
            text += f"; the logits agree when `{self.explained_by}` is turned the other way"
        return text


def replay(recording: Path, draft_dir: Path, verifier_dir: Path, *, dtype: str, max_steps: int = 256) -> LogitParity:
    """Feed a probe's recording through our module of the draft and compare.

    Args:
        dtype: that the engine computed in.
        max_steps: replay no more than this many.

    Raises:
        EvaluationError: nothing was recorded that could be replayed, or the algorithm has no proposer yet.
        FormatError: the draft cannot be read, or is not one of ours.
    """
    draft = ServedDraft.open(draft_dir, verifier_dir)
    return replay_steps(read_steps(recording, max_steps), draft, dtype)[0]


def replay_steps(steps: Sequence[ProbedStep], draft: ServedDraft, dtype: str) -> tuple[LogitParity, list[Tensor]]:
    """The comparison over steps in memory, and what we would have drafted in each, fed as the engine was: int64 [K].

    Raises:
        FormatError: the draft's tensors are not those of its config.json.
    """
    found, choices = _compare(steps, draft, draft.module(), dtype)
    if found.holds:
        return found, choices
    for name in draft.proposer.conventions:
        try:
            model = draft.module(turned=name)
        except ValueError:  # excluded by another knob
            continue
        if _compare(steps[:_TRIED_STEPS], draft, model, dtype)[0].holds:
            return found.model_copy(update={"explained_by": name}), choices
    return found, choices


def _compare(
    steps: Sequence[ProbedStep], draft: ServedDraft, model: nn.Module, dtype: str
) -> tuple[LogitParity, list[Tensor]]:
    tolerance = TOLERANCE.get(dtype, TOLERANCE["bfloat16"])
    rows: list[_Rows] = []
    choices: list[Tensor] = []
    with torch.inference_mode():
        for step in steps:
            context = DraftContext(step.fed_ids, step.features)
            ours_KV = draft.proposer.logits(model, context, step.drafted.numel(), _as_drafted(step.drafted))
            rows.append(_Rows.of(step.logits.float(), ours_KV.float(), step.drafted, tolerance))
            choices.append(ours_KV.argmax(dim=-1))
    parity = LogitParity(
        algorithm=draft.name,
        dtype=dtype,
        requests=len({step.request_id for step in steps}),
        steps=len(steps),
        tolerance=tolerance,
        positions=tuple(_position(k, rows) for k in range(max(len(row.max_abs) for row in rows))),
        same_tokens=all(row.same_tokens for row in rows),
        same_drafts=sum(bool((row.agreed | row.tied).all()) for row in rows),
        tied_steps=sum(bool(row.tied.any()) for row in rows),
    )
    return parity, choices


def _as_drafted(drafted_K: Tensor) -> Choose:
    """Each token is what the engine fed to the next, whatever we would choose."""
    tokens: list[int] = drafted_K.tolist()
    return lambda place, _: tokens[place]


class _Rows:
    """One step's K comparisons."""

    def __init__(self, max_abs: Tensor, relative: Tensor, tied: Tensor, agreed: Tensor, *, same_tokens: bool) -> None:
        self.max_abs, self.relative, self.tied, self.agreed = max_abs, relative, tied, agreed
        self.same_tokens = same_tokens

    @classmethod
    def of(cls, engine_KV: Tensor, ours_KV: Tensor, drafted_K: Tensor, tolerance: float) -> _Rows:
        finite_KV = engine_KV.isfinite()
        same_tokens = torch.equal(finite_KV, ours_KV.isfinite())
        finite_KV &= ours_KV.isfinite()
        difference_KV = torch.where(finite_KV, engine_KV - ours_KV, 0.0)
        norm_K = torch.where(finite_KV, engine_KV, 0.0).norm(dim=-1)
        relative_K = difference_KV.norm(dim=-1) / norm_K
        rounding_K = relative_K.clamp_max(tolerance) * norm_K / finite_KV.sum(dim=-1).sqrt()
        best_K2 = engine_KV.topk(2, dim=-1).values
        return cls(
            difference_KV.abs().amax(dim=-1),
            relative_K,
            best_K2[:, 0] - best_K2[:, 1] <= TIE * rounding_K,
            ours_KV.argmax(dim=-1) == drafted_K,
            same_tokens=same_tokens,
        )


def _position(k: int, rows: Iterable[_Rows]) -> PositionParity:
    there = [row for row in rows if k < len(row.max_abs)]
    return PositionParity(
        position=k + 1,
        compared=len(there),
        max_abs=max(float(row.max_abs[k]) for row in there),
        relative=max(float(row.relative[k]) for row in there),
        ties=sum(bool(row.tied[k]) for row in there),
        agreed=sum(bool(row.agreed[k]) and not bool(row.tied[k]) for row in there),
    )


def read_steps(recording: Path, max_steps: int) -> list[ProbedStep]:
    """Steps of a recording that can be replayed, in order. EvaluationError where there are none."""
    try:
        steps = list(islice(follow_requests(read_batches(recording)), max_steps))
    except ConnectorError as error:
        raise EvaluationError(f"the draft probe's recording cannot be read: {error.what}", mend=error.mend) from error
    if not steps:
        raise EvaluationError(
            f"the draft probe recorded nothing in {recording} that could be replayed",
            mend="the probe knows vLLM's Model Runner V1 (set VLLM_USE_V2_MODEL_RUNNER=0) and needs prefix caching "
            "off; see the engine's log",
        )
    return steps
