"""Runs one golden case through our DSpark in `compat` mode, in float32."""

from __future__ import annotations

from torch import Tensor

from speculators_core.algorithms.dspark.config import DSparkConfig
from speculators_core.algorithms.dspark.model import DSparkDraft
from speculators_core.algorithms.dspark.objective import DSparkObjective
from speculators_core.types import StepResult
from tests.parity.golden import GoldenCase
from tests.parity.golden_blocks import block_knobs, geometry_of, load, mask_token_of, own_knobs, run_step, vocabulary_of

OWN = {
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "confidence_head_alpha": 1.0,
}


def run_dspark(case: GoldenCase) -> tuple[StepResult, dict[str, Tensor]]:
    tensors = case.tensors()
    config = DSparkConfig(**block_knobs(case, sample_from_anchor=True), **own_knobs(case, OWN))
    model = DSparkDraft(
        config,
        geometry_of(case, tensors),
        case.dims(tensors)["num_aux"],
        vocabulary_of(tensors),
        mask_token_id=mask_token_of(case, tensors),
    )
    load(model, case, tensors)
    return run_step(model, DSparkObjective(config), tensors)
