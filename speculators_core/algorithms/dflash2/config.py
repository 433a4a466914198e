"""Every knob of DFlash2, typed and strict."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from speculators_core.algorithms._blocks.block_knobs import MaskedBlockKnobs, check_blocks
from speculators_core.errors import ConfigError
from speculators_core.types import DraftPlan


class DFlash2Config(MaskedBlockKnobs):
    """Blocks filled in at once with short convolutions along them, each token chosen by the one before."""

    kind: Literal["dflash2"] = Field(default="dflash2", description="name of the algorithm")
    block_size: int = Field(default=8, ge=2, le=128, description="B: the last known token and B - 1 masks behind it")
    sliding_window_non_causal: bool = Field(
        default=True, description="slots of a block see each other both ways on sliding layers too"
    )
    conv_kernel_size: int = Field(default=2, ge=1, le=16, description="slots that a convolution reaches")
    conv_group_size: int = Field(default=16, ge=1, description="channels that share a dynamic kernel; divides H")
    selector_rank: int = Field(default=256, ge=1, le=2**16, description="rank of the transition score")
    selector_top_k: int = Field(default=16, ge=2, description="best tokens of a slot that the selector chooses among")
    selector_loss_alpha: float = Field(default=1.0, ge=0, description="weight of the selector's loss")


def check(config: DFlash2Config, plan: DraftPlan) -> None:
    """ConfigError where the recipe's rows, tokens or vocabulary do not suit the draft."""
    check_blocks(config, plan)
    if plan.draft_vocabulary is not None and plan.draft_vocabulary != plan.vocab_size:
        raise ConfigError(
            f"draft_vocabulary is {plan.draft_vocabulary}, but DFlash2 chooses among all of the verifier's tokens",
            mend="set draft_vocabulary to null, or choose dflash",
        )
