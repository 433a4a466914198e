"""Runs one golden case through our EAGLE-3 in `compat` mode, in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from speculators_core.algorithms._blocks.geometry import FULL, SLIDING, LayerGeometry
from speculators_core.algorithms._blocks.teacher import Teacher
from speculators_core.algorithms._blocks.vocabulary import checked_vocabulary
from speculators_core.algorithms.eagle3.config import Eagle3Config
from speculators_core.algorithms.eagle3.model import Eagle3Draft
from speculators_core.algorithms.eagle3.objective import Eagle3Objective
from speculators_core.types import Batch, StepResult
from tests.parity.golden import GoldenCase

FROZEN = {"verifier_lm_head.weight", "verifier_norm.weight"}


def build(case: GoldenCase, tensors: dict[str, Tensor]) -> tuple[Eagle3Draft, Eagle3Objective]:
    shape, dims = case.summary["case"], case.dims(tensors)
    knobs = {
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "norm_before_residual": False,
        **case.summary["model_kwargs"],
    }
    call: dict[str, Any] = {"ttt_steps": 3, "ttt_step_loss_decay": 1.0, **case.summary["call"]}
    window = case.summary["sliding_window"]
    config = Eagle3Config(
        style=shape["arch"],
        layers=shape["nl"],
        loss=case.summary["loss_fn"],
        sliding_window=window,
        full_attention_layers=tuple(shape["fa"]),
        compat=True,
        loss_chunk=7,  # several chunks even in a tiny case
        **{key: knobs[key] for key in ("norm_before_fc", "fc_norm", "norm_output", "norm_before_residual")},
        **{key: call[key] for key in ("ttt_steps", "ttt_step_loss_decay")},
    )
    geometry = LayerGeometry(
        style=shape["arch"],
        vocab_size=dims["vocab_size"],
        hidden_size=dims["hidden_size"],
        intermediate_size=dims["intermediate_size"],
        num_attention_heads=dims["num_attention_heads"],
        num_key_value_heads=dims["num_key_value_heads"],
        head_dim=dims["head_dim"],
        layer_types=tuple(FULL if window is None or i in shape["fa"] else SLIDING for i in range(shape["nl"])),
        sliding_window=window,
        rms_norm_eps=dims["rms_norm_eps"],
        rope_parameters={"rope_type": "default", "rope_theta": dims["rope_theta"]},
        max_position_embeddings=512,
        initializer_range=0.02,
    )
    weights = {name[2:]: tensor for name, tensor in tensors.items() if name.startswith("w.")}
    vocabulary = None
    if "d2t" in weights:
        vocabulary = checked_vocabulary(weights["d2t"], weights["t2d"], dims["vocab_size"])
    model = Eagle3Draft(config, geometry, dims["num_aux"], vocabulary)
    model.borrow(weights["embed_tokens.weight"], weights["lm_head.weight"])
    model.load_state_dict({name: w for name, w in weights.items() if name not in FROZEN}, strict=True)
    model.teacher = Teacher(
        weights["verifier_norm.weight"], weights["verifier_lm_head.weight"], eps=dims["rms_norm_eps"]
    )
    return model, Eagle3Objective(config)


def run_eagle3(case: GoldenCase) -> tuple[StepResult, dict[str, Tensor]]:
    tensors = case.tensors()
    model, objective = build(case, tensors)
    batch = Batch(
        input_ids=tensors["in.input_ids"][0].long(),
        loss_mask=tensors["in.loss_mask"][0].bool(),
        position_ids=tensors["in.position_ids"][0].long(),
        document_ids=tensors["in.document_ids"][0].long(),
        aux_TAH=tensors["in.hidden_states"][0],
        last_TH=tensors["in.verifier_last_hidden_states"][0],
    )
    result = objective.step(model, batch, objective.denominators(batch))
    result.loss.backward()  # type: ignore[no-untyped-call]
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert all(torch.isfinite(g).all() for g in gradients.values())
    return result, gradients
