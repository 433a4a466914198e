"""Every knob of XPress, typed and strict."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from speculators_core.algorithms._blocks.block_knobs import BlockKnobs, check_blocks
from speculators_core.errors import ConfigError
from speculators_core.types import DraftPlan


class XPressConfig(BlockKnobs):
    """Blocks filled in at once, then refined in parallel rounds that each know the round before."""

    kind: Literal["xpress"] = Field(default="xpress", description="name of the algorithm")
    loss: str | dict[str, float] = Field(
        default_factory=lambda: {"ce": 0.1, "tv": 0.9},
        description="kl_div, rkl, jsd, ce, tv, nla, lk_hybrid, or a mapping of them to weights",
    )
    xpress_rank: int = Field(default=256, ge=1, le=2**16, description="width of the refiner")
    xpress_mlp_ratio: int = Field(
        default=2, ge=1, le=64, description="width of its feed-forward part in units of the rank"
    )
    num_jacobi_passes: int = Field(default=6, ge=1, le=64, description="rounds of refinement when it is served")
    consistency_weight: float = Field(default=0.3, ge=0, description="weight of the loss of free-running rounds")
    consistency_passes: int = Field(default=3, ge=1, le=64, description="free-running rounds in training")
    base_anchor_weight: float = Field(default=0.6, ge=0, description="weight of the loss without the refiner")
    base_anchor_full_weight: bool = Field(default=False, description="that loss does not weigh slots by distance")
    ce_from_data: bool = Field(default=False, description="ce wants the text's next token, not the verifier's best")

    @model_validator(mode="after")
    def _loss_has_ce(self) -> XPressConfig:
        if self.ce_from_data and all(term.name != "ce" for term in self.loss_terms):
            raise ValueError("ce_from_data is true, but the loss has no ce: add it, or leave ce_from_data out")
        return self


def check(config: XPressConfig, plan: DraftPlan) -> None:
    """ConfigError where the recipe's rows, tokens or vocabulary do not suit, or nothing can serve the draft."""
    check_blocks(config, plan)
    if config.ce_from_data and plan.draft_vocabulary not in (None, plan.vocab_size):
        raise ConfigError(
            "algorithm.ce_from_data wants every token of the text, which a reduced vocabulary does not have",
            mend="set draft_vocabulary to null, or algorithm.ce_from_data to false",
        )
    if not plan.allow_unservable:
        raise ConfigError(
            "algorithm.kind is xpress, but vLLM 0.32 has no loader for it",
            mend="choose dflash or dspark, or set export.allow_unservable to train it all the same",
        )
