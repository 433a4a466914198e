"""Runs one golden case through our DFlash in `compat` mode, in float32."""

from __future__ import annotations

from torch import Tensor

from speculators_core.algorithms.dflash.config import DFlashConfig
from speculators_core.algorithms.dflash.model import DFlashDraft
from speculators_core.algorithms.dflash.objective import DFlashObjective
from speculators_core.types import StepResult
from tests.parity.golden import GoldenCase
from tests.parity.golden_blocks import block_knobs, geometry_of, load, mask_token_of, run_step, vocabulary_of


def run_dflash(case: GoldenCase) -> tuple[StepResult, dict[str, Tensor]]:
    tensors = case.tensors()
    config = DFlashConfig(**block_knobs(case))
    geometry = geometry_of(case, tensors)
    model = DFlashDraft(
        config,
        geometry,
        case.dims(tensors)["num_aux"],
        vocabulary_of(tensors),
        mask_token_id=mask_token_of(case, tensors),
    )
    load(model, case, tensors)
    return run_step(model, DFlashObjective(config), tensors)
