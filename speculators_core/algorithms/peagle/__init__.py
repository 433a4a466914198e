"""P-EAGLE: all tokens of a draft from one parallel pass over verifier features (arXiv 2602.01469)."""

from __future__ import annotations

from speculators_core.algorithms._blocks.aux_layers import aux_layers
from speculators_core.algorithms._blocks.lazy import later, proposer_in
from speculators_core.algorithms._blocks.mask_token import mask_token
from speculators_core.algorithms.peagle.config import PEagleConfig
from speculators_core.types import Algorithm

ALGORITHM = Algorithm(
    name="peagle",
    config=PEagleConfig,
    build=later(f"{__name__}.build", "build"),
    objective=later(f"{__name__}.objective", "PEagleObjective"),
    export=later(f"{__name__}.export", "export"),
    aux_layers=aux_layers,
    check=later(f"{__name__}.build", "check"),
    mask_token=mask_token,
    proposer=proposer_in(__name__, conventions=("norm_before_residual", "norm_before_fc", "fc_norm")),
)
