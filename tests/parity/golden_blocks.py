"""What the golden cases of block drafts share: knobs, geometry, batch and weights read from the case."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from speculators_core.algorithms._blocks.block_draft import BlockDraft
from speculators_core.algorithms._blocks.geometry import FULL, SLIDING, LayerGeometry
from speculators_core.algorithms._blocks.teacher import Teacher
from speculators_core.algorithms._blocks.vocabulary import ReducedVocabulary, checked_vocabulary
from speculators_core.types import Batch, Objective, StepResult
from tests.parity.golden import GoldenCase

FROZEN = {"verifier_lm_head.weight", "verifier_norm.weight"}


def block_knobs(case: GoldenCase, **defaults: Any) -> dict[str, Any]:
    """Knobs that all block drafts have, in our names; `defaults` are the algorithm's own."""
    shape = case.summary["case"]
    options = {
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
        "gamma": 4.0,
        "per_position_loss_weight": "fixed-exp-decay",
        "dpace_alpha": 0.5,
        **defaults,
        **case.summary["model_kwargs"],
        **case.summary["call"],
    }
    return {
        "layers": shape["nl"],
        "block_size": options["block_size"],
        "max_anchors": options["max_anchors"],
        "sample_from_anchor": options["sample_from_anchor"],
        "sliding_window": case.summary["sliding_window"],
        "full_attention_indices": tuple(shape["fa"]),
        "sliding_window_non_causal": options["sliding_window_non_causal"],
        "loss": case.summary["loss_fn"],
        "position_weights": options["per_position_loss_weight"],
        "decay_gamma": options["gamma"],
        "dpace_alpha": options["dpace_alpha"],
        "compat": True,
        "loss_chunk": 7,  # several chunks even in a tiny case
    }


def own_knobs(case: GoldenCase, defaults: dict[str, Any]) -> dict[str, Any]:
    """The algorithm's own knobs: the case's, and the peer's defaults for what it leaves out."""
    given = {**case.summary["model_kwargs"], **case.summary["call"]}
    return {name: given.get(name, default) for name, default in defaults.items()}


def geometry_of(case: GoldenCase, tensors: dict[str, Tensor]) -> LayerGeometry:
    shape, dims, window = case.summary["case"], case.dims(tensors), case.summary["sliding_window"]
    return LayerGeometry(
        style="qwen3",
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


def mask_token_of(case: GoldenCase, tensors: dict[str, Tensor]) -> int:
    dims = case.dims(tensors)
    return int(dims.get("mask_token_id", dims["vocab_size"] - 1))


def vocabulary_of(tensors: dict[str, Tensor]) -> ReducedVocabulary | None:
    if "w.d2t" not in tensors:
        return None
    return checked_vocabulary(tensors["w.d2t"], tensors["w.t2d"], tensors["w.embed_tokens.weight"].shape[0])


def load(model: BlockDraft, case: GoldenCase, tensors: dict[str, Tensor]) -> None:
    weights = {name[2:]: tensor for name, tensor in tensors.items() if name.startswith("w.")}
    model.borrow(weights["embed_tokens.weight"], weights["lm_head.weight"])
    model.load_state_dict({name: w for name, w in weights.items() if name not in FROZEN}, strict=True)
    eps = case.dims(tensors)["rms_norm_eps"]
    model.teacher = Teacher(weights["verifier_norm.weight"], weights["verifier_lm_head.weight"], eps=eps)


def run_step(
    model: nn.Module, objective: Objective, tensors: dict[str, Tensor]
) -> tuple[StepResult, dict[str, Tensor]]:
    batch = Batch(
        input_ids=tensors["in.input_ids"][0].long(),
        loss_mask=tensors["in.loss_mask"][0].bool(),
        position_ids=tensors["in.position_ids"][0].long(),
        document_ids=tensors["in.document_ids"][0].long(),
        aux_TAH=tensors["in.hidden_states"][0],
        last_TH=tensors["in.verifier_last_hidden_states"][0],
    )
    result = objective.step(model, batch, objective.denominators(batch))
    torch.autograd.backward(result.loss)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert all(torch.isfinite(g).all() for g in gradients.values())
    return result, gradients
