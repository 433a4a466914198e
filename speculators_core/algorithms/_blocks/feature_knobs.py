"""Knobs that every draft over joined verifier features has."""

from __future__ import annotations

from pydantic import Field, model_validator

from speculators_core.algorithms._blocks.geometry import LayerStyle
from speculators_core.algorithms._blocks.loss_knobs import LossKnobs


class FeatureKnobs(LossKnobs):
    """Shape of a `FeatureDraft`, and what it learns from. An algorithm's configuration adds how."""

    style: LayerStyle = Field(default="llama", description="decoder layers as llama, or as qwen3 (normed heads)")
    layers: int = Field(default=1, ge=1, le=16, description="decoder layers of the draft")
    intermediate_size: int | None = Field(
        default=None,
        gt=0,
        le=2**20,
        description="feed-forward width; default: the verifier's, three times H for experts",
    )
    aux_layers: tuple[int, ...] | None = Field(
        default=None, description="verifier layers that feed the draft; default 2, N/2, N-3 of N"
    )
    norm_before_residual: bool = Field(default=True, description="the first residual is the normed feature")
    norm_before_fc: bool = Field(default=True, description="one norm over all features before they are joined")
    fc_norm: bool = Field(default=False, description="one norm for each feature before they are joined")
    sliding_window: int | None = Field(default=2048, gt=0, description="keys that a layer sees; null: all of them")
    full_attention_layers: tuple[int, ...] = Field(default=(), description="draft layers that see everything")
    train_lm_head: bool = Field(default=False, description="train the vocabulary head instead of freezing it")
    loss_chunk: int = Field(default=128, ge=1, description="positions that go through the vocabulary head at a time")
    compat: bool = Field(
        default=False,
        description="mask and align exactly as speculators 0.9 does, faults included; for comparisons only",
    )

    @model_validator(mode="after")
    def _features_are_consistent(self) -> FeatureKnobs:
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm exclude each other: set one of them to false")
        if self.aux_layers is not None and len(self.aux_layers) == 0:
            raise ValueError("aux_layers is empty: leave it out for the default")
        return self
