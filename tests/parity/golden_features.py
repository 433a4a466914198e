"""What golden cases of drafts over verifier features have in common: geometry, weights and the packed row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from speculators_core.algorithms._blocks.feature_draft import FeatureDraft
from speculators_core.algorithms._blocks.geometry import FULL, SLIDING, LayerGeometry
from speculators_core.algorithms._blocks.teacher import Teacher
from speculators_core.algorithms._blocks.vocabulary import ReducedVocabulary, checked_vocabulary
from speculators_core.types import Batch
from tests.parity.golden import GoldenCase

FROZEN = {"verifier_lm_head.weight", "verifier_norm.weight"}
NORMS = ("norm_before_fc", "fc_norm", "norm_before_residual")


def shape_knobs(case: GoldenCase) -> dict[str, Any]:
    """The knobs that every such algorithm has, as the case states them; several chunks even in a tiny case."""
    shape = case.summary["case"]
    flags = {**dict.fromkeys(NORMS, False), **case.summary["model_kwargs"]}
    return {
        "style": shape["arch"],
        "layers": shape["nl"],
        "loss": case.summary["loss_fn"],
        "sliding_window": case.summary["sliding_window"],
        "full_attention_layers": tuple(shape["fa"]),
        "compat": True,
        "loss_chunk": 7,
        **{name: flags[name] for name in NORMS},
    }


def geometry(case: GoldenCase, dims: dict[str, Any]) -> LayerGeometry:
    shape, window = case.summary["case"], case.summary["sliding_window"]
    return LayerGeometry(
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


def weights(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name[2:]: tensor for name, tensor in tensors.items() if name.startswith("w.")}


def vocabulary(tensors: dict[str, Tensor], dims: dict[str, Any]) -> ReducedVocabulary | None:
    if "w.d2t" not in tensors:
        return None
    return checked_vocabulary(tensors["w.d2t"], tensors["w.t2d"], dims["vocab_size"])


def load(model: FeatureDraft, tensors: dict[str, Tensor], dims: dict[str, Any]) -> None:
    """The case's weights into the draft and its teacher, all in float32."""
    named = weights(tensors)
    model.borrow(named["embed_tokens.weight"], named["lm_head.weight"])
    model.load_state_dict({name: w for name, w in named.items() if name not in FROZEN}, strict=True)
    model.teacher = Teacher(named["verifier_norm.weight"], named["verifier_lm_head.weight"], eps=dims["rms_norm_eps"])


def batch(tensors: dict[str, Tensor]) -> Batch:
    return Batch(
        input_ids=tensors["in.input_ids"][0].long(),
        loss_mask=tensors["in.loss_mask"][0].bool(),
        position_ids=tensors["in.position_ids"][0].long(),
        document_ids=tensors["in.document_ids"][0].long(),
        aux_TAH=tensors["in.hidden_states"][0],
        last_TH=tensors["in.verifier_last_hidden_states"][0],
    )


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert all(torch.isfinite(g).all() for g in found.values())
    return found
