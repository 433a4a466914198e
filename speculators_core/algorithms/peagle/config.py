"""Every knob of P-EAGLE (arXiv 2602.01469), typed and strict."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from speculators_core.algorithms._blocks.feature_knobs import FeatureKnobs
from speculators_core.types import MOST_DRAFTED


class PEagleConfig(FeatureKnobs):
    """A draft that proposes all its tokens at once: one real row, and masked rows behind it."""

    kind: Literal["peagle"] = Field(default="peagle", description="name of the algorithm")
    num_depths: int = Field(
        default=8, ge=1, le=32, description="tokens proposed by one pass: the real row's, and one for each masked row"
    )
    down_sample_ratio: float = Field(
        default=0.7, gt=0, le=1, description="share of the chains that is learned at depth d: ratio to the d"
    )
    down_sample_ratio_min: float = Field(default=0.2, ge=0, le=1, description="that share never falls below this")
    max_anchors: int | None = Field(
        default=None, ge=1, description="chains of a packed row that the shares are taken of; null: all of them"
    )
    mask_token_id: int | None = Field(
        default=None, ge=0, description="token that stands in a masked row; null: one that conversations never hold"
    )
    speculative_tokens: int | None = Field(
        default=None,
        ge=1,
        le=MOST_DRAFTED,
        description="tokens that vLLM drafts at a time, at most num_depths; default: num_depths",
    )

    @model_validator(mode="after")
    def _depths_are_consistent(self) -> PEagleConfig:
        if self.speculative_tokens is not None and self.speculative_tokens > self.num_depths:
            raise ValueError(
                f"speculative_tokens is {self.speculative_tokens}, but only num_depths = {self.num_depths} are learned:"
                " raise num_depths, or draft fewer"
            )
        if self.sliding_window is not None and self.sliding_window < self.num_depths and not self.compat:
            raise ValueError(
                f"sliding_window is {self.sliding_window}, so the last of num_depths = {self.num_depths} tokens would"
                " not see the row that it is drafted from: widen the window, or lower num_depths"
            )
        return self

    @property
    def drafted_tokens(self) -> int:
        """Tokens that the served draft proposes at a time."""
        return self.speculative_tokens or self.num_depths
