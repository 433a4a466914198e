"""Every knob of EAGLE-3 (arXiv 2503.01840), typed and strict."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from speculators_core.algorithms._blocks.aux_layers import chosen_layers
from speculators_core.algorithms._blocks.geometry import LayerStyle
from speculators_core.errors import ConfigError
from speculators_core.losses.terms import LossTerm, parse_loss
from speculators_core.types import StrictModel


class Eagle3Config(StrictModel):
    """A draft that continues the verifier's own features, trained by unrolling it as serving does."""

    kind: Literal["eagle3"] = Field(default="eagle3", description="name of the algorithm")
    style: LayerStyle = Field(default="llama", description="decoder layers as llama, or as qwen3 (normed heads)")
    layers: int = Field(default=1, ge=1, le=16, description="decoder layers of the draft")
    intermediate_size: int | None = Field(
        default=None, gt=0, description="feed-forward width; default: the verifier's, three times H for experts"
    )
    aux_layers: tuple[int, ...] | None = Field(
        default=None, description="verifier layers that feed the draft; default 2, N/2, N-3 of N"
    )
    norm_before_residual: bool = Field(default=True, description="the first residual is the normed feature")
    norm_before_fc: bool = Field(default=True, description="one norm over all features before they are joined")
    fc_norm: bool = Field(default=False, description="one norm for each feature before they are joined")
    norm_output: bool = Field(default=True, description="the state handed to the next step is the normed one")
    ttt_steps: int = Field(default=3, ge=1, le=16, description="steps that the draft is unrolled in training")
    ttt_step_loss_decay: float = Field(default=1.0, gt=0, le=1, description="step k weighs decay to the k")
    loss: str | dict[str, float] = Field(
        default="kl_div", description="kl_div, rkl, jsd, ce, tv, nla, lk_hybrid, or a mapping of them to weights"
    )
    sliding_window: int | None = Field(default=2048, gt=0, description="keys that a layer sees; null: all of them")
    full_attention_layers: tuple[int, ...] = Field(default=(), description="draft layers that see everything")
    speculative_tokens: int | None = Field(
        default=None, ge=1, description="tokens that vLLM drafts at a time; default: ttt_steps"
    )
    train_lm_head: bool = Field(default=False, description="train the vocabulary head instead of freezing it")
    loss_chunk: int = Field(default=128, ge=1, description="positions that go through the vocabulary head at a time")
    compat: bool = Field(
        default=False,
        description="mask and align exactly as speculators 0.9 does, faults included; for comparisons only",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Eagle3Config:
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm exclude each other: set one of them to false")
        if self.aux_layers is not None and len(self.aux_layers) == 0:
            raise ValueError("aux_layers is empty: leave it out for the default")
        try:
            parse_loss(self.loss)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return self

    @property
    def loss_terms(self) -> tuple[LossTerm, ...]:
        """The loss as a weighted sum."""
        return parse_loss(self.loss)

    @property
    def drafted_tokens(self) -> int:
        """Tokens that the served draft proposes at a time."""
        return self.speculative_tokens or self.ttt_steps


def aux_layers(config: Eagle3Config, num_hidden_layers: int) -> tuple[int, ...]:
    """Auxiliary layer ids, ascending; ConfigError where this verifier has no such layers."""
    return chosen_layers(config.aux_layers, num_hidden_layers)
