"""MTP: a verifier's own multi-token head, tuned to be run several times in a row (FastMTP, arXiv 2509.18362)."""

from __future__ import annotations

from speculators_core.algorithms._blocks.lazy import later, proposer_in
from speculators_core.algorithms.mtp.config import MTPConfig, aux_layers
from speculators_core.types import Algorithm

ALGORITHM = Algorithm(
    name="mtp",
    config=MTPConfig,
    build=later(f"{__name__}.build", "build"),
    objective=later(f"{__name__}.objective", "MTPObjective"),
    export=later(f"{__name__}.export", "export"),
    aux_layers=aux_layers,
    check=later(f"{__name__}.build", "check"),
    stitch=later(f"{__name__}.export", "stitch"),
    names=later(f"{__name__}.native", "own_names"),
    proposer=proposer_in(__name__),
)
