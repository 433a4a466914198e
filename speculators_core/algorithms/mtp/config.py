"""Every knob of multi-token-prediction fine-tuning (FastMTP, arXiv 2509.18362), typed and strict."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from speculators_core.algorithms._blocks.loss_knobs import LossKnobs
from speculators_core.types import MOST_DRAFTED


class MTPConfig(LossKnobs):
    """The verifier's own multi-token head, trained on to be run several times in a row."""

    kind: Literal["mtp"] = Field(default="mtp", description="name of the algorithm")
    num_speculative_steps: int = Field(
        default=3, ge=1, le=16, description="steps that the head is unrolled in training, each fed by the one before"
    )
    step_weight_beta: float = Field(
        default=0.6, gt=0, le=1, description="step k weighs beta to the k, and all weights add up to one"
    )
    speculative_tokens: int | None = Field(
        default=None,
        ge=1,
        le=MOST_DRAFTED,
        description="tokens that vLLM drafts at a time; default: num_speculative_steps",
    )
    loss_chunk: int = Field(default=128, ge=1, description="positions that go through the vocabulary head at a time")
    compat: bool = Field(
        default=False,
        description="feed, mask and learn exactly as speculators 0.9 does, faults included; for comparisons only",
    )

    @property
    def step_weights(self) -> tuple[float, ...]:
        """Weight of each step."""
        powers = [self.step_weight_beta**step for step in range(self.num_speculative_steps)]
        return tuple(power / sum(powers) for power in powers)

    @property
    def drafted_tokens(self) -> int:
        """Tokens that the served head drafts at a time."""
        return self.speculative_tokens or self.num_speculative_steps


def aux_layers(config: MTPConfig, num_hidden_layers: int) -> tuple[int, ...]:
    """None: a native head reads the last state alone."""
    return ()
