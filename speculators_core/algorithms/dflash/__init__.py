"""DFlash: a block of masks behind the newest token, filled in by one pass over the verifier's features."""

from __future__ import annotations

from speculators_core.algorithms._blocks.aux_layers import aux_layers
from speculators_core.algorithms._blocks.block_knobs import check_blocks
from speculators_core.algorithms._blocks.lazy import later, proposer_in
from speculators_core.algorithms._blocks.mask_token import mask_token
from speculators_core.algorithms.dflash.config import DFlashConfig
from speculators_core.types import Algorithm

ALGORITHM = Algorithm(
    name="dflash",
    config=DFlashConfig,
    build=later(f"{__name__}.build", "build"),
    objective=later(f"{__name__}.objective", "DFlashObjective"),
    export=later(f"{__name__}.export", "export"),
    aux_layers=aux_layers,
    check=check_blocks,
    mask_token=mask_token,
    proposer=proposer_in(__name__, conventions=("sliding_window_non_causal",)),
    additions=("mask_embedding",),
)
