"""Our drafts in the layouts that other engines load: EAGLE-3 as SafeAILab's code and SGLang read it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from speculators_core.convert.reading import authors_layers
from speculators_core.errors import ConfigError, FormatError
from speculators_core.formats.config import FeatureDraftConfig
from speculators_core.formats.servable import DEFAULT_FEATURES, parse_config
from speculators_core.types import ExportedDraft

if TYPE_CHECKING:
    from torch import Tensor

LAYER_KEYS = (
    "attention_bias", "attention_dropout", "bos_token_id", "eos_token_id", "head_dim", "hidden_act", "hidden_size",
    "initializer_range", "intermediate_size", "max_position_embeddings", "mlp_bias", "num_attention_heads",
    "num_hidden_layers", "num_key_value_heads", "pad_token_id", "pretraining_tp", "rms_norm_eps",
    "tie_word_embeddings", "use_cache", "vocab_size",
)  # fmt: skip
"""Keys of a Llama configuration that both readers share with our layer config."""
TARGETS = ("safeai", "sglang")


def to_foreign(
    draft: ExportedDraft, target: str, verifier_layers: int | None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and tensors in the layout of that name.

    Args:
        verifier_layers: decoder layers of the verifier; without them, SafeAILab's fixed choice cannot be checked.

    Raises:
        ConfigError: no such layout.
        FormatError: the draft has parts that the layout's readers would ignore; each is named with what to train.
    """
    if target not in TARGETS:
        raise ConfigError(
            f"--to {target!r} is not a layout to write", mend=f"choose draftsmith or {', '.join(TARGETS)}"
        )
    config = parse_config(draft.config)
    if not isinstance(config, FeatureDraftConfig) or config.speculators_model_type != "eagle3":
        raise FormatError(
            f"{target} has no layout for a draft of {config.speculators_model_type}", mend="only EAGLE-3 is written so"
        )
    _require_expressible(config, target, verifier_layers)
    layers = config.transformer_layer_config
    rope = dict(layers["rope_parameters"])
    theta, kind = rope.pop("rope_theta", 10000.0), rope.get("rope_type", "default")
    written: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **{key: layers[key] for key in LAYER_KEYS if key in layers},
        "rope_theta": theta,
        "rope_scaling": None if kind == "default" else rope,
        "draft_vocab_size": config.draft_vocab_size,
        "torch_dtype": "bfloat16",
        "transformers_version": config.transformers_version,
    }
    if config.target_hidden_size is not None:
        written["target_hidden_size"] = config.target_hidden_size
    if target == "sglang":
        written |= _sglang_keys(config, verifier_layers)
    one_layer = layers["num_hidden_layers"] == 1
    # both readers take the embedding from the verifier
    tensors = {
        name.replace("layers.0.", "midlayer.") if one_layer else name: tensor
        for name, tensor in draft.tensors.items()
        if name != "embed_tokens.weight"
    }
    return written, tensors


def _sglang_keys(config: FeatureDraftConfig, verifier_layers: int | None) -> dict[str, Any]:
    ids = config.eagle_aux_hidden_state_layer_ids
    keys: dict[str, Any] = {"fc_norm": config.fc_norm, "norm_output": config.norm_output}
    if len(ids) != DEFAULT_FEATURES:
        keys["num_aux_hidden_states"] = len(ids)
    if verifier_layers is None or ids != authors_layers(verifier_layers):
        # it counts outputs; without the key it takes the authors' layers
        counted = [layer - 1 for layer in ids]
        keys["eagle_config"] = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": counted}
    return keys


def _require_expressible(config: FeatureDraftConfig, target: str, verifier_layers: int | None) -> None:
    layers = config.transformer_layer_config
    ids = config.eagle_aux_hidden_state_layer_ids
    lacking = {
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
    }
    if target == "safeai":
        lacking |= {"fc_norm": config.fc_norm, "norm_output": config.norm_output}
    knobs = [f"{knob}: false" for knob, used in lacking.items() if used]
    if layers["model_type"] != "llama":
        knobs.append("style: llama")
    if "sliding_attention" in layers.get("layer_types", ()):
        knobs.append("sliding_window: null")
    if target == "safeai" and layers["num_hidden_layers"] != 1:
        knobs.append("layers: 1")
    if target == "safeai" and verifier_layers is None:
        raise ConfigError(
            "SafeAILab's code has the layers that feed a draft built in, and nothing says how many the verifier has",
            mend="name the verifier: --verifier",
        )
    if target == "safeai" and verifier_layers is not None and ids != (fixed := authors_layers(verifier_layers)):
        knobs.append(f"aux_layers: {list(fixed)}")
    if target == "sglang" and 0 in ids:
        knobs.append("aux_layers without 0")
    if layers.get("logit_scale", 1.0) != 1.0:
        raise FormatError(f"the verifier scales its logits, which the layout {target} has no word for")
    if knobs:
        raise FormatError(
            f"readers of the layout {target} would ignore parts of this draft, and accept less of it",
            mend=f"train it with algorithm: {{{', '.join(knobs)}}}",
        )


__all__ = ["TARGETS", "to_foreign"]
