"""A foreign decoder configuration as the `transformer_layer_config` that our own exports write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speculators_core.algorithms._blocks.geometry import FULL, LayerGeometry, LayerStyle, flatten_rope
from speculators_core.errors import FormatError

NEEDED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "rms_norm_eps",
)


def geometry_of(config: Mapping[str, Any], style: LayerStyle, *, sliding: bool) -> LayerGeometry:
    """Dimensions of a draft's layers from a plain transformers config, of version 4 or 5.

    Args:
        sliding: whether the layout's own code keeps to `layer_types` and `sliding_window`; else all layers see all.

    Raises:
        FormatError: a key is missing, or the layers have biases.
    """
    missing = [key for key in NEEDED if not config.get(key)]
    if missing:
        raise FormatError(f"config.json lacks {', '.join(missing)}", mend="copy the draft's own config.json again")
    for flag in ("attention_bias", "mlp_bias"):
        if config.get(flag):
            raise FormatError(f"config.json sets {flag}, but drafts here have no biases")
    if config.get("hidden_act", "silu") != "silu":
        raise FormatError(f"config.json names the activation {config['hidden_act']!r}; drafts here use silu")
    layers, heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
    kinds = tuple((config.get("layer_types") or ()) if sliding else ())[:layers] or (FULL,) * layers
    eos = config.get("eos_token_id")
    return LayerGeometry(
        style=style,
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_attention_heads=heads,
        num_key_value_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        layer_types=kinds,
        sliding_window=None if set(kinds) == {FULL} else config.get("sliding_window"),
        rms_norm_eps=config["rms_norm_eps"],
        rope_parameters=rope_of(config),
        max_position_embeddings=config.get("max_position_embeddings") or 2048,
        initializer_range=config.get("initializer_range") or 0.02,
        bos_token_id=config.get("bos_token_id"),
        eos_token_id=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        pad_token_id=config.get("pad_token_id"),
    )


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """One rope dictionary, from `rope_parameters` or from the older `rope_theta` and `rope_scaling`."""
    written = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = config.get("rope_theta")
    return flatten_rope({**({} if theta is None else {"rope_theta": float(theta)}), **written})
