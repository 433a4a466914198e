"""Runs one golden case through our DFlash2 in `compat` mode, in float32."""

from __future__ import annotations

from torch import Tensor

from speculators_core.algorithms.dflash2.config import DFlash2Config
from speculators_core.algorithms.dflash2.model import DFlash2Draft
from speculators_core.algorithms.dflash2.objective import DFlash2Objective
from speculators_core.types import StepResult
from tests.parity.golden import GoldenCase
from tests.parity.golden_blocks import block_knobs, geometry_of, load, mask_token_of, own_knobs, run_step

OWN = {
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 256,
    "selector_top_k": 16,
    "selector_loss_alpha": 1.0,
}


def run_dflash2(case: GoldenCase) -> tuple[StepResult, dict[str, Tensor]]:
    tensors = case.tensors()
    config = DFlash2Config(**block_knobs(case, sliding_window_non_causal=True), **own_knobs(case, OWN))
    geometry, num_aux = geometry_of(case, tensors), case.dims(tensors)["num_aux"]
    model = DFlash2Draft(config, geometry, num_aux, mask_token_id=mask_token_of(case, tensors))
    load(model, case, tensors)
    return run_step(model, DFlash2Objective(config), tensors)
