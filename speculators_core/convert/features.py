"""EAGLE-3 and P-EAGLE from foreign layouts: which features feed the draft, which norms it has, what it borrows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from speculators_core.convert.decoder import geometry_of
from speculators_core.convert.names import renamed, unfused, with_our_vocabulary
from speculators_core.convert.reading import Draft, Reading, authors_layers, require_layers
from speculators_core.errors import FormatError
from speculators_core.formats.servable import DEFAULT_FEATURES

if TYPE_CHECKING:
    from torch import Tensor

DEFAULT_TOKENS = {"eagle3": 3, "peagle": 8}
"""Tokens drafted at a time where nobody says: what the speculators format writes for a fresh draft."""


def read_feature_draft(kind: str, reading: Reading) -> Draft:
    """A draft that joins verifier features.

    Layer ids at the top of config.json count as here. Those in `eagle_config` count outputs, as SGLang and Model
    Optimizer do (id 1 is our 2). Without any, three features are those of layers 2, N/2 and N − 3.

    Raises:
        FormatError: it does not fit the verifier, or has parts that no draft here has.
    """
    config = reading.source.config
    eagle = config.get("eagle_config") or {}
    tensors = renamed(reading.layout, reading.source.tensors())
    if eagle.get("use_aux_hidden_state", True) is False:
        raise FormatError("eagle_config.use_aux_hidden_state is false: it drafts from one feature, as EAGLE-1 does")
    normed_heads = any(name.endswith("self_attn.q_norm.weight") for name in tensors)
    geometry = geometry_of(config, "qwen3" if normed_heads else "llama", sliding=False)
    width = config.get("target_hidden_size") or geometry.hidden_size
    reading.require_shape(width, geometry.vocab_size)
    layers, tensors = geometry.to_transformers(), unfused(tensors, geometry)
    ids = _layer_ids(config, eagle, tensors, width, reading)
    if len(ids) != DEFAULT_FEATURES:
        layers["num_aux_hidden_states"] = len(ids)
    draft_size = int(config.get("draft_vocab_size") or geometry.vocab_size)
    fc_norm = bool(config.get("fc_norm") or config.get("use_aux_norm"))
    keys: dict[str, Any] = {
        "draft_vocab_size": draft_size,
        "target_hidden_size": None if width == geometry.hidden_size else width,
        "eagle_aux_hidden_state_layer_ids": ids,
        "fc_norm": fc_norm,
        "norm_before_fc": bool(eagle.get("norm_before_fc", config.get("norm_before_fc", False))),
        "norm_before_residual": bool(config.get("norm_before_residual", False)),
        "norm_output": bool(config.get("norm_output", False)),
        "embed_requires_grad": False,
    }
    if kind == "peagle":
        keys |= {"mask_token_id": reading.mask_token(config), "norm_output": False, "embed_requires_grad": True}
        if "mask_hidden" in tensors:
            tensors["mask_hidden"] = tensors["mask_hidden"].reshape(1, 1, -1)
        if fc_norm:
            layers["fc_norm"] = True
    tensors = with_our_vocabulary(tensors, geometry.vocab_size, draft_size)
    tokens = reading.options.speculative_tokens or DEFAULT_TOKENS[kind]
    return reading.draft(kind, layers, keys, reading.with_borrowed(tensors, draft_size), tokens)


def _layer_ids(
    config: Mapping[str, Any], eagle: Mapping[str, Any], tensors: Mapping[str, Tensor], width: int, reading: Reading
) -> tuple[int, ...]:
    if "fc.weight" not in tensors or tensors["fc.weight"].ndim != 2 or tensors["fc.weight"].shape[1] % width:
        raise FormatError(f"fc.weight is missing, or does not join features of {width} channels")
    count = tensors["fc.weight"].shape[1] // width
    written, counted = config.get("eagle_aux_hidden_state_layer_ids"), eagle.get("eagle_aux_hidden_state_layer_ids")
    depth = reading.facts.num_hidden_layers
    if reading.options.aux_layers is not None:
        ids = reading.options.aux_layers
    elif written:
        ids = tuple(written)
    elif counted:
        ids = tuple(layer + 1 for layer in counted)
        reading.note(f"eagle_config counts outputs of layers: {list(counted)} are {list(ids)} here")
    elif count == DEFAULT_FEATURES:
        ids = authors_layers(depth)
        reading.note(f"the checkpoint names no layers: {list(ids)}, as its authors take them")
    else:
        raise FormatError(
            f"the draft joins {count} features, and nothing says of which layers", mend="name them: --aux-layers"
        )
    if len(ids) != count:
        raise FormatError(
            f"{len(ids)} layers feed the draft ({list(ids)}), but fc.weight joins {count} features",
            mend="name the right ones: --aux-layers",
        )
    return require_layers(ids, depth)
