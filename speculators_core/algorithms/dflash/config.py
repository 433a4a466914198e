"""Every knob of DFlash, typed and strict."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from speculators_core.algorithms._blocks.aux_layers import chosen_layers
from speculators_core.algorithms._blocks.block_knobs import MaskedBlockKnobs, check_blocks
from speculators_core.types import DraftPlan


class DFlashConfig(MaskedBlockKnobs):
    """A draft that fills in the masks behind the newest token, all at once."""

    kind: Literal["dflash"] = Field(default="dflash", description="name of the algorithm")
    loss: str | dict[str, float] = Field(
        default="ce", description="kl_div, rkl, jsd, ce, tv, nla, lk_hybrid, or a mapping of them to weights"
    )
    position_weights: Literal["fixed-exp-decay", "dpace"] = Field(
        default="dpace",
        description="slots weigh less with their distance, or (dpace) with the chance that serving needs them",
    )


def aux_layers(config: DFlashConfig, num_hidden_layers: int) -> tuple[int, ...]:
    """Auxiliary layer ids, ascending; ConfigError where this verifier has no such layers."""
    return chosen_layers(config.aux_layers, num_hidden_layers)


def check(config: DFlashConfig, plan: DraftPlan) -> None:
    """ConfigError where the recipe's rows or tokens do not suit the blocks."""
    check_blocks(config, plan)
