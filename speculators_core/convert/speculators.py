"""Checkpoints in the speculators format itself, of whichever version: what later versions write is filled in.

A checkpoint that lacks nothing comes out with the same keys and the same bytes of tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speculators_core.convert.decoder import geometry_of
from speculators_core.convert.layouts import SPECULATORS_KEY
from speculators_core.convert.names import with_our_vocabulary
from speculators_core.convert.options import ConvertOptions
from speculators_core.convert.reading import Draft, Reading, authors_layers
from speculators_core.errors import ConfigError, FormatError
from speculators_core.formats.config import CONFIGS, FeatureDraftConfig
from speculators_core.formats.shapes import NEEDED
from speculators_core.types import ExportedDraft

IGNORED = ("auto_map", "torch_dtype", "dtype", "has_no_defaults_at_init")
"""Keys that other writers leave, and that say nothing of the draft."""
DEFAULTS: dict[str, dict[str, Any]] = {
    "eagle3": {
        "embed_requires_grad": False,
        "fc_norm": False,
        "norm_before_fc": False,
        "norm_before_residual": True,  # vLLM's default for a missing key, whatever the writer's is
        "norm_output": False,
    },
    "peagle": {
        "embed_requires_grad": True,
        "fc_norm": False,
        "norm_before_fc": False,
        "norm_before_residual": False,
        "norm_output": False,
    },
    "dflash": {"sample_from_anchor": False, "sliding_window_non_causal": True},
    "dflash2": {"sample_from_anchor": False, "sliding_window_non_causal": True},
    "dspark": {"sample_from_anchor": False, "sliding_window_non_causal": False},
}
"""What vLLM takes a missing key for: `transformers_utils/configs/speculators/algos.py` of 0.32."""


def read_speculators(reading: Reading) -> Draft:
    """The draft with every key that our own exports have.

    Raises:
        FormatError: an algorithm that is not known here, or keys that are not of the format.
    """
    config = reading.source.config
    kind = str(config[SPECULATORS_KEY])
    if kind not in CONFIGS:
        raise FormatError(
            f"config.json: {SPECULATORS_KEY} {kind!r} is none of {', '.join(sorted(CONFIGS))}",
            mend="drafts of other algorithms are not converted",
        )
    kept = {key: value for key, value in config.items() if key not in IGNORED}
    unknown = sorted(kept.keys() - CONFIGS[kind].model_fields.keys())
    if unknown:
        raise FormatError(f"config.json has keys that the format does not know: {', '.join(unknown)}")
    filled = {key: value for key, value in DEFAULTS.get(kind, {}).items() if kept.get(key) is None}
    if filled:
        reading.note(f"taken as vLLM takes them, since they are missing: {', '.join(sorted(filled))}")
    kept |= _told(kind, kept, reading.options)
    layers = _layers(kind, kept.get("transformer_layer_config") or {})
    kept |= {**filled, "transformer_layer_config": layers}
    if issubclass(CONFIGS[kind], FeatureDraftConfig) and not kept.get("eagle_aux_hidden_state_layer_ids"):
        depth = reading.facts.num_hidden_layers
        kept["eagle_aux_hidden_state_layer_ids"] = authors_layers(depth)
        reading.note("the checkpoint names no layers: 2, N/2 and N - 3 of its verifier")
    kept["speculators_config"] = _section(reading, kept.get("speculators_config") or {})
    kept = {"architectures": ["DraftModel"], "transformers_version": "unknown", **kept}
    tensors = reading.source.tensors()
    if "draft_vocab_size" in kept and "vocab_size" in layers:
        tensors = with_our_vocabulary(tensors, layers["vocab_size"], kept["draft_vocab_size"])
    if issubclass(CONFIGS[kind], FeatureDraftConfig) and not {"embed_tokens.weight", "lm_head.weight"} <= set(tensors):
        tensors = reading.with_borrowed(tensors, kept["draft_vocab_size"])
    return ExportedDraft({**kept, "dtype": "bfloat16"}, reading.served(tensors))


def _told(kind: str, written: Mapping[str, Any], options: ConvertOptions) -> dict[str, Any]:
    """What the user says and the checkpoint leaves open; ConfigError where it says something else."""
    layers = "eagle_aux_hidden_state_layer_ids"
    if layers not in CONFIGS[kind].model_fields:
        layers = "aux_hidden_state_layer_ids"
    found: dict[str, Any] = {}
    for option, key, value in (
        ("--aux-layers", layers, options.aux_layers),
        ("--mask-token-id", "mask_token_id", options.mask_token_id),
    ):
        if value is None:
            continue
        found[key] = list(value) if isinstance(value, tuple) else value
        if written.get(key, found[key]) != found[key] or key not in CONFIGS[kind].model_fields:
            raise ConfigError(
                f"{option} says {found[key]}, and config.json {key}: {written.get(key)}", mend="leave the option out"
            )
    return found


def _layers(kind: str, written: Mapping[str, Any]) -> dict[str, Any]:
    """The layer config as it is; one that lacks what shapes are worked out from is completed."""
    layers = {key: value for key, value in written.items() if key not in ("torch_dtype", "dtype")}
    if kind == "mtp" or all(key in layers for key in NEEDED):
        return dict(written)
    style = layers.setdefault("model_type", "llama" if kind == "eagle3" else "qwen3")
    if style not in ("llama", "qwen3"):
        raise FormatError(f"transformer_layer_config.model_type {style!r} is neither llama nor qwen3")
    full = geometry_of(layers, style, sliding=True).to_transformers()
    own = {key: value for key, value in layers.items() if key not in ("rope_theta", "rope_scaling")}
    return full | {key: value for key, value in own.items() if value is not None}


def _section(reading: Reading, written: Mapping[str, Any]) -> dict[str, Any]:
    """`speculators_config`, with a verifier where the checkpoint leaves it open or the user names another."""
    section = dict(written)
    verifier = dict(section.get("verifier") or {})
    if reading.publish is not None:
        verifier["name_or_path"] = reading.publish
    if not verifier.get("architectures"):
        verifier["architectures"] = list(reading.facts.architectures)
    section["verifier"] = verifier
    if reading.options.speculative_tokens is not None:
        methods = [dict(method) for method in section.get("proposal_methods") or [{}]]
        methods[0]["speculative_tokens"] = reading.options.speculative_tokens
        section["proposal_methods"] = methods
    return section
