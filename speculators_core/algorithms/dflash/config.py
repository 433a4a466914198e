"""Every knob of DFlash, typed and strict."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from speculators_core.algorithms._blocks.block_knobs import MaskedBlockKnobs


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
