"""EAGLE-3: a small decoder that continues the verifier's own features (arXiv 2503.01840)."""

from __future__ import annotations

from speculators_core.algorithms._blocks.aux_layers import aux_layers
from speculators_core.algorithms._blocks.lazy import later, proposer_in
from speculators_core.algorithms.eagle3.config import Eagle3Config
from speculators_core.types import Algorithm

ALGORITHM = Algorithm(
    name="eagle3",
    config=Eagle3Config,
    build=later(f"{__name__}.build", "build"),
    objective=later(f"{__name__}.objective", "Eagle3Objective"),
    export=later(f"{__name__}.export", "export"),
    aux_layers=aux_layers,
    proposer=proposer_in(__name__, conventions=("norm_before_residual", "norm_output", "norm_before_fc", "fc_norm")),
)
