"""Runs one golden case through our EAGLE-3 in `compat` mode, in float32."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from speculators_core.algorithms.eagle3.config import Eagle3Config
from speculators_core.algorithms.eagle3.model import Eagle3Draft
from speculators_core.algorithms.eagle3.objective import Eagle3Objective
from speculators_core.types import StepResult
from tests.parity import golden_features as features
from tests.parity.golden import GoldenCase


def run_eagle3(case: GoldenCase) -> tuple[StepResult, dict[str, Tensor]]:
    tensors = case.tensors()
    dims = case.dims(tensors)
    call: dict[str, Any] = {"ttt_steps": 3, "ttt_step_loss_decay": 1.0, **case.summary["call"]}
    config = Eagle3Config(
        norm_output=case.summary["model_kwargs"].get("norm_output", False),
        **features.shape_knobs(case),
        **{key: call[key] for key in ("ttt_steps", "ttt_step_loss_decay")},
    )
    model = Eagle3Draft(config, features.geometry(case, dims), dims["num_aux"], features.vocabulary(tensors, dims))
    features.load(model, tensors, dims)
    objective, batch = Eagle3Objective(config), features.batch(tensors)
    result = objective.step(model, batch, objective.denominators(batch))
    result.loss.backward()  # type: ignore[no-untyped-call]
    return result, features.gradients(model)
