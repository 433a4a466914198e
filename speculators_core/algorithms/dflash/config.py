"""Every knob of DFlash, typed and strict."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from speculators_core.algorithms._blocks.aux_layers import chosen_layers
from speculators_core.algorithms._blocks.block_knobs import BlockKnobs, check_blocks
from speculators_core.types import DraftPlan


class DFlashConfig(BlockKnobs):
    """A draft that fills in the masks behind the newest token, all at once."""

    kind: Literal["dflash"] = Field(default="dflash", description="name of the algorithm")
    loss: str | dict[str, float] = Field(
        default="ce", description="kl_div, rkl, jsd, ce, tv, nla, lk_hybrid, or a mapping of them to weights"
    )
    position_weights: Literal["fixed-exp-decay", "dpace"] = Field(
        default="dpace",
        description="slots weigh less with their distance, or (dpace) with the chance that serving needs them",
    )
    train_mask_embedding: bool = Field(
        default=True, description="the mask gets an embedding of the draft's own, which vLLM reads beside the weights"
    )

    @model_validator(mode="after")
    def _is_served_as_trained(self) -> DFlashConfig:
        if self.compat:
            return self
        if self.sample_from_anchor:
            raise ValueError("sample_from_anchor is true, but vLLM drafts DFlash from masks alone: set it to false")
        full = self.sliding_window is None or bool(self.full_attention_indices)
        if full and not self.sliding_window_non_causal:
            raise ValueError(
                "a full-attention layer lets slots see each other both ways, but vLLM would then serve every layer "
                "causally: set sliding_window_non_causal to true, or give all layers the sliding window"
            )
        return self


def aux_layers(config: DFlashConfig, num_hidden_layers: int) -> tuple[int, ...]:
    """Auxiliary layer ids, ascending; ConfigError where this verifier has no such layers."""
    return chosen_layers(config.aux_layers, num_hidden_layers)


def check(config: DFlashConfig, plan: DraftPlan) -> None:
    """ConfigError where the recipe's rows or tokens do not suit the blocks."""
    check_blocks(config, plan)
