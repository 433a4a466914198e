"""Verifiers small enough for a test that carry a native head, one of each family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from speculators_core.algorithms.mtp.config import MTPConfig
from speculators_core.algorithms.mtp.families import FAMILIES, layer_config
from speculators_core.algorithms.mtp.model import MTPHead
from speculators_core.algorithms.mtp.native import to_native
from tests.unit.speculators_core.algorithms.tiny import HIDDEN, LAYERS, VOCAB, write_verifier

_QWEN: dict[str, Any] = {
    "partial_rotary_factor": 0.5,
    "full_attention_interval": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * (LAYERS // 4),
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
_ROUTED: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_next": {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], **_QWEN, **_EXPERTS},
    "qwen3_5": {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], **_QWEN},
    "qwen3_5_moe": {"model_type": "qwen3_5_moe_text", "architectures": ["Qwen3_5MoeForCausalLM"], **_QWEN, **_EXPERTS},
    "mimo": {"model_type": "qwen2", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1},
    "glm4_moe": {
        "model_type": "glm4_moe",
        "architectures": ["Glm4MoeForCausalLM"],
        "partial_rotary_factor": 0.5,
        "use_qk_norm": True,
        **_ROUTED,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
        **_ROUTED,
    },
}


def write_native_verifier(directory: Path, name: str, **changes: Any) -> Path:
    """A verifier's config.json and tensors with a random head of that family; experts lie one by one on disk."""
    return add_head(write_verifier(directory, **CONFIGS[name], **changes), name)


def add_head(directory: Path, name: str) -> Path:
    """Draw a head of that family beside the verifier that lies there already."""
    family = next(family for family in FAMILIES if family.name == name)
    text = json.loads((directory / "config.json").read_text())
    head = MTPHead(MTPConfig(), family, layer_config(family, text))
    generator = torch.Generator().manual_seed(3)
    drawn: dict[str, Tensor] = {}
    for key, value in head.head_tensors().items():
        noise = torch.randn(value.shape, generator=generator)
        drawn[key] = (0.2 * noise if value.dim() > 1 else 0.9 + 0.2 * noise).bfloat16()
    native = to_native(drawn, family, LAYERS, ())
    weights = directory / "model.safetensors"
    apart = {key: value.contiguous() for key, value in native.items()}
    save_file(load_file(weights) | apart, weights, metadata={"format": "pt"})
    return directory


__all__ = ["CONFIGS", "HIDDEN", "VOCAB", "write_native_verifier"]
