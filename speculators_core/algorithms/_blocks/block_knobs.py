"""Knobs that every draft of anchored blocks has."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from speculators_core.algorithms._blocks.loss_knobs import LossKnobs
from speculators_core.algorithms._blocks.mask_token import mask_token
from speculators_core.errors import ConfigError
from speculators_core.types import DraftPlan


class BlockKnobs(LossKnobs):
    """Shape of a `BlockDraft`, which blocks it learns from, and with what weights. An algorithm adds its heads."""

    layers: int = Field(default=5, ge=1, le=32, description="decoder layers of the draft")
    intermediate_size: int | None = Field(
        default=None,
        gt=0,
        le=2**20,
        description="feed-forward width; default: the verifier's, three times H for experts",
    )
    aux_layers: tuple[int, ...] | None = Field(
        default=None, description="verifier layers that are the draft's context; default 2, N/2, N-3 of N"
    )
    block_size: int = Field(default=16, ge=2, le=128, description="B: the last known token and B - 1 masks behind it")
    max_anchors: int = Field(default=512, ge=1, description="blocks that are learned of a packed row, drawn at random")
    sample_from_anchor: bool = Field(
        default=False, description="slot k is asked for the token after it, so that the anchor drafts too"
    )
    sliding_window: int | None = Field(default=2048, gt=0, description="keys that a layer sees; null: all of them")
    full_attention_indices: tuple[int, ...] = Field(default=(), description="draft layers that see everything")
    sliding_window_non_causal: bool = Field(
        default=False, description="slots of a block see each other both ways on sliding layers too"
    )
    position_weights: Literal["fixed-exp-decay", "dpace"] = Field(
        default="fixed-exp-decay",
        description="slots weigh less with their distance, or (dpace) with the chance that serving needs them",
    )
    decay_gamma: float = Field(default=4.0, gt=0, description="fixed-exp-decay: e-folding distance in slots")
    dpace_alpha: float = Field(default=0.5, gt=0, le=1, description="dpace: smallest chance that a slot is passed")
    mask_token_id: int | None = Field(
        default=None, ge=0, description="token that stands for a token to draft; default: one that text never holds"
    )
    loss_chunk: int = Field(default=128, ge=1, description="positions that go through the vocabulary head at a time")
    compat: bool = Field(
        default=False,
        description="mask, choose and count exactly as speculators 0.9 does, faults included; for comparisons only",
    )

    @model_validator(mode="after")
    def _blocks_are_consistent(self) -> BlockKnobs:
        if self.aux_layers is not None and len(self.aux_layers) == 0:
            raise ValueError("aux_layers is empty: leave it out for the default")
        outside = [index for index in self.full_attention_indices if not 0 <= index < self.layers]
        if outside:
            raise ValueError(
                f"full_attention_indices names {outside}, but the draft has {self.layers} layers counted from 0: "
                "name layers of the draft, not of the verifier"
            )
        if self.position_weights == "dpace" and [term.name for term in self.loss_terms] != ["ce"]:
            raise ValueError(
                "position_weights dpace needs loss ce, whose value is the chance of a slot: "
                "set loss to ce, or position_weights to fixed-exp-decay"
            )
        return self

    @property
    def first_slot(self) -> int:
        """The first slot that drafts."""
        return 0 if self.sample_from_anchor else 1

    @property
    def drafted_tokens(self) -> int:
        """Tokens that the served draft proposes at a time."""
        return self.block_size - self.first_slot

    def causal(self, layer_is_sliding: bool) -> bool:
        """Whether the slots of a block see only what is before them on such a layer."""
        return layer_is_sliding and not self.sliding_window_non_causal


class MaskedBlockKnobs(BlockKnobs):
    """Blocks that are drafted from masks alone, all slots at once."""

    train_mask_embedding: bool = Field(
        default=True, description="the mask gets an embedding of the draft's own, which vLLM reads beside the weights"
    )

    @model_validator(mode="after")
    def _is_served_as_trained(self) -> MaskedBlockKnobs:
        if self.compat:
            return self
        if self.sample_from_anchor:
            raise ValueError(
                "sample_from_anchor is true, but vLLM drafts such blocks from masks alone: set it to false"
            )
        full = self.sliding_window is None or bool(self.full_attention_indices)
        if full and not self.sliding_window_non_causal:
            raise ValueError(
                "a full-attention layer lets slots see each other both ways, but vLLM would then serve every layer "
                "causally: set sliding_window_non_causal to true, or give all layers the sliding window"
            )
        return self


def check_blocks(knobs: BlockKnobs, plan: DraftPlan) -> None:
    """ConfigError where the recipe's rows, tokens or evaluation do not suit the blocks."""
    if knobs.block_size >= plan.row_tokens:
        raise ConfigError(
            f"algorithm.block_size is {knobs.block_size}, but training.row_tokens only {plan.row_tokens}: "
            "no block would fit into a row",
            mend="lower algorithm.block_size, or raise training.row_tokens",
        )
    if plan.k is not None and plan.k > knobs.drafted_tokens:
        raise ConfigError(
            f"evaluation.k is {plan.k}, but blocks of algorithm.block_size = {knobs.block_size} learn only "
            f"{knobs.drafted_tokens} tokens",
            mend="raise algorithm.block_size, or lower evaluation.k",
        )
    mask_token(knobs, plan.verifier_dir)
