"""Every knob of EAGLE-3 (arXiv 2503.01840), typed and strict."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from speculators_core.algorithms._blocks.feature_knobs import FeatureKnobs
from speculators_core.types import MOST_DRAFTED


class Eagle3Config(FeatureKnobs):
    """A draft that continues the verifier's own features, trained by unrolling it as serving does."""

    kind: Literal["eagle3"] = Field(default="eagle3", description="name of the algorithm")
    norm_output: bool = Field(default=True, description="the state handed to the next step is the normed one")
    ttt_steps: int = Field(default=3, ge=1, le=16, description="steps that the draft is unrolled in training")
    # what a step gets right counts only where those before it were right: 0.8 was accepted for longer than 1.0
    ttt_step_loss_decay: float = Field(default=0.8, gt=0, le=1, description="step k weighs decay to the k")
    speculative_tokens: int | None = Field(
        default=None, ge=1, le=MOST_DRAFTED, description="tokens that vLLM drafts at a time; default: ttt_steps"
    )

    @property
    def drafted_tokens(self) -> int:
        """Tokens that the served draft proposes at a time."""
        return self.speculative_tokens or self.ttt_steps
