"""DSpark: blocks filled in at once, corrected from left to right by the token before, with a stated confidence."""

from __future__ import annotations

from speculators_core.algorithms._blocks.aux_layers import aux_layers
from speculators_core.algorithms._blocks.lazy import later, proposer_in
from speculators_core.algorithms._blocks.mask_token import mask_token
from speculators_core.algorithms.dspark.config import DSparkConfig, check
from speculators_core.types import Algorithm

ALGORITHM = Algorithm(
    name="dspark",
    config=DSparkConfig,
    build=later(f"{__name__}.build", "build"),
    objective=later(f"{__name__}.objective", "DSparkObjective"),
    export=later(f"{__name__}.export", "export"),
    aux_layers=aux_layers,
    check=check,
    mask_token=mask_token,
    proposer=proposer_in(__name__, conventions=("sliding_window_non_causal",)),
    starts_from=("dflash",),
    additions=("markov_head.", "confidence_head."),
)
