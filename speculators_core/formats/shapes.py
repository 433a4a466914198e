"""Shapes of the tensors that every draft has, worked out from the layer config as vLLM does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Shape = tuple[int, ...]

NEEDED = (
    "hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "rms_norm_eps", "layer_types", "rope_parameters",
)  # fmt: skip


def check_layer_config(layer: Mapping[str, Any], problems: list[str]) -> bool:
    """Whether shapes can be worked out; what vLLM would trip over is added to `problems`."""
    missing = [key for key in NEEDED if layer.get(key) is None]
    if missing:
        problems.append(f"transformer_layer_config lacks {', '.join(missing)}")
        return False
    if len(layer["layer_types"]) != layer["num_hidden_layers"]:
        problems.append("layer_types does not name every layer")
        return False
    if "sliding_attention" in layer["layer_types"] and not layer.get("sliding_window"):
        problems.append("a sliding layer has no sliding_window")
    for flag in ("attention_bias", "mlp_bias"):
        if layer.get(flag):
            problems.append(f"{flag} is set, but drafts have no biases")
    return True


def layer_shapes(layer: Mapping[str, Any], index: int, width: int, *, normed_heads: bool) -> dict[str, Shape]:
    """Tensors of decoder layer `index` whose attention reads rows of `width`."""
    hidden, wide = layer["hidden_size"], layer["intermediate_size"]
    queries = layer["num_attention_heads"] * layer["head_dim"]
    keys = layer["num_key_value_heads"] * layer["head_dim"]
    prefix = f"layers.{index}."
    shapes: dict[str, Shape] = {
        f"{prefix}self_attn.q_proj.weight": (queries, width),
        f"{prefix}self_attn.k_proj.weight": (keys, width),
        f"{prefix}self_attn.v_proj.weight": (keys, width),
        f"{prefix}self_attn.o_proj.weight": (hidden, queries),
        f"{prefix}mlp.gate_proj.weight": (wide, hidden),
        f"{prefix}mlp.up_proj.weight": (wide, hidden),
        f"{prefix}mlp.down_proj.weight": (hidden, wide),
        f"{prefix}input_layernorm.weight": (hidden,),
        f"{prefix}post_attention_layernorm.weight": (hidden,),
    }
    if normed_heads:
        shapes |= {f"{prefix}self_attn.{name}_norm.weight": (layer["head_dim"],) for name in "qk"}
    return shapes
