"""DFlash2: blocks with short convolutions along them, and a selector that knows the token before."""

from __future__ import annotations

from speculators_core.algorithms._blocks.aux_layers import aux_layers
from speculators_core.algorithms._blocks.lazy import later, proposer_in
from speculators_core.algorithms._blocks.mask_token import mask_token
from speculators_core.algorithms.dflash2.config import DFlash2Config, check
from speculators_core.types import Algorithm

ALGORITHM = Algorithm(
    name="dflash2",
    config=DFlash2Config,
    build=later(f"{__name__}.build", "build"),
    objective=later(f"{__name__}.objective", "DFlash2Objective"),
    export=later(f"{__name__}.export", "export"),
    aux_layers=aux_layers,
    check=check,
    mask_token=mask_token,
    proposer=proposer_in(__name__, conventions=("sliding_window_non_causal",)),
    additions=("mask_embedding",),
)
