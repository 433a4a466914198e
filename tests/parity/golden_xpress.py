"""Runs one golden case through our XPress in `compat` mode, in float32."""

from __future__ import annotations

from torch import Tensor

from speculators_core.algorithms.xpress.config import XPressConfig
from speculators_core.algorithms.xpress.model import XPressDraft
from speculators_core.algorithms.xpress.objective import XPressObjective
from speculators_core.types import StepResult
from tests.parity.golden import GoldenCase
from tests.parity.golden_blocks import block_knobs, geometry_of, load, mask_token_of, own_knobs, run_step, vocabulary_of

OWN = {
    "xpress_rank": 256,
    "xpress_mlp_ratio": 2,
    "consistency_weight": 0.3,
    "consistency_passes": 3,
    "base_anchor_weight": 0.6,
    "base_anchor_full_weight": False,
    "ce_from_data": False,
}


def run_xpress(case: GoldenCase) -> tuple[StepResult, dict[str, Tensor]]:
    tensors = case.tensors()
    config = XPressConfig(**block_knobs(case), **own_knobs(case, OWN))
    model = XPressDraft(
        config,
        geometry_of(case, tensors),
        case.dims(tensors)["num_aux"],
        vocabulary_of(tensors),
        mask_token_id=mask_token_of(case, tensors),
    )
    load(model, case, tensors)
    return run_step(model, XPressObjective(config), tensors)
