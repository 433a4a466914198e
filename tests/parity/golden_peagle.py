"""Runs one golden case through our P-EAGLE in `compat` mode, in float32, with the case's own elements."""

from __future__ import annotations

import torch
from torch import Tensor

from speculators_core.algorithms.peagle.config import PEagleConfig
from speculators_core.algorithms.peagle.elements import Elements
from speculators_core.algorithms.peagle.model import PEagleDraft
from speculators_core.algorithms.peagle.objective import PEagleObjective
from speculators_core.types import Batch, StepResult
from tests.parity import golden_features as features
from tests.parity.golden import GoldenCase


def given_elements(tensors: dict[str, Tensor], batch: Batch, depths: int) -> Elements:
    anchor_N, depth_N = tensors["in.cod_anchor"].flatten().long(), tensors["in.cod_depth"].flatten().long()
    anchors = [anchor_N[depth_N == depth].sort().values for depth in range(depths)]
    assert all(int(rows.min()) >= 0 for rows in anchors if rows.numel()), "chains that start before the row"
    counted = [batch.loss_mask[rows + depth] for depth, rows in enumerate(anchors)]
    return Elements(tuple(anchors), tuple(counted), batch.document_ids)


def run_peagle(case: GoldenCase) -> tuple[StepResult, dict[str, Tensor]]:
    tensors = case.tensors()
    dims, batch = case.dims(tensors), features.batch(tensors)
    depths = case.summary["call"].get("num_depths", 8)
    config = PEagleConfig(num_depths=depths, **features.shape_knobs(case))
    model = PEagleDraft(
        config,
        features.geometry(case, dims),
        dims["num_aux"],
        features.vocabulary(tensors, dims),
        dims["mask_token_id"],
    )
    features.load(model, tensors, dims)
    elements = given_elements(tensors, batch, depths)
    number = torch.tensor([sum(int(counted.sum()) for counted in elements.counted)], dtype=torch.float64)
    result = PEagleObjective(config).learn(model, batch, elements, number)
    result.loss.backward()  # type: ignore[no-untyped-call]
    return result, features.gradients(model)
