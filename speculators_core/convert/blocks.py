"""DFlash, DFlash2 and DSpark from foreign layouts: ids that count outputs, knobs in `dflash_config`, causality."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speculators_core.algorithms._blocks.geometry import SLIDING, LayerGeometry
from speculators_core.convert.decoder import geometry_of
from speculators_core.convert.names import renamed, unfused, with_our_vocabulary
from speculators_core.convert.reading import Draft, Reading, require_layers
from speculators_core.errors import FormatError

SELECTING = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
NEUTRAL = {"input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": None}
"""Knobs of z-lab's that the speculators format cannot carry, and the values at which they do nothing."""


def read_block_draft(reading: Reading) -> Draft:
    """A draft that fills in the masks behind the newest token.

    Raises:
        FormatError: it does not fit the verifier, or could not be served as it was trained.
    """
    config = reading.source.config
    nested = config.get("dflash_config") or {}

    def value(key: str) -> Any:
        return nested.get(key, config.get(key))

    for key, neutral in NEUTRAL.items():
        if value(key) not in (None, neutral):
            raise FormatError(
                f"dflash_config.{key} is {value(key)}, which the speculators format cannot carry",
                mend="serve the checkpoint as it is: vLLM reads this layout itself",
            )
    kind = _kind(reading, value)
    geometry = geometry_of(config, "qwen3", sliding=True)
    reading.require_shape(geometry.hidden_size, geometry.vocab_size)
    layers, block = geometry.to_transformers(), value("block_size")
    if block is None:
        raise FormatError("config.json has no block_size, neither at the top nor in dflash_config")
    tensors = unfused(renamed(reading.layout, reading.source.tensors()), geometry)
    draft_size = int(value("draft_vocab_size") or geometry.vocab_size)
    keys: dict[str, Any] = {
        "draft_vocab_size": draft_size,
        "aux_hidden_state_layer_ids": _layer_ids(value("target_layer_ids"), reading),
        "block_size": block,
        "mask_token_id": reading.mask_token({**config, **nested}),
        "sample_from_anchor": kind == "dspark",
        "sliding_window_non_causal": _non_causal(kind, geometry, config, nested),
    }
    if kind == "dflash2":
        keys |= {key: value(key) for key in SELECTING}
    if kind == "dspark":
        keys |= _heads(value, layers, keys)
    tensors = with_our_vocabulary(tensors, geometry.vocab_size, draft_size)
    tokens = reading.options.speculative_tokens or (block if kind == "dspark" else block - 1)
    return reading.draft(kind, layers, keys, reading.without_borrowed(tensors, draft_size), tokens)


def _kind(reading: Reading, value: Any) -> str:
    if reading.layout.name == "deepspec":
        return "dspark"
    return "dflash2" if value("selector_rank") is not None else "dflash"


def _layer_ids(written: Any, reading: Reading) -> tuple[int, ...]:
    if reading.options.aux_layers is not None:
        ids = reading.options.aux_layers
    elif written:
        ids = tuple(layer + 1 for layer in written)  # they count outputs; −1 is the embedding's
    else:
        raise FormatError("config.json names no target_layer_ids", mend="name them as counted here: --aux-layers")
    return require_layers(ids, reading.facts.num_hidden_layers)


def _non_causal(kind: str, geometry: LayerGeometry, config: Mapping[str, Any], nested: Mapping[str, Any]) -> bool:
    """Whether a block's slots see each other both ways; by default sliding layers are causal, and full ones are not."""
    stated = config.get("is_causal") if config.get("is_causal") is not None else nested.get("causal")
    causal = {layer == SLIDING if stated is None else bool(stated) for layer in geometry.layer_types}
    if kind == "dspark":  # vLLM falls back to the same default for this method
        return SLIDING in geometry.layer_types and causal == {False}
    if causal == {True, False}:
        raise FormatError(
            "its sliding layers are causal and its full ones are not; the speculators format has one word for all",
            mend="serve the checkpoint as it is: vLLM reads this layout itself",
        )
    return causal == {False}


def _heads(value: Any, layers: dict[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    if keys["sliding_window_non_causal"]:
        layers["is_causal"] = False  # the only word that vLLM reads for this method
    confident = bool(value("enable_confidence_head"))
    return {
        "markov_rank": int(value("markov_rank") or 0),
        "markov_head_type": value("markov_head_type") or "vanilla",
        "enable_confidence_head": confident,
        "confidence_head_with_markov": confident and bool(value("confidence_head_with_markov")),
    }
