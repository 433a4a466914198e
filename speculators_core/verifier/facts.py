"""What a draft must know of its verifier's architecture, read from config.json alone.

Two styles of rope settings, nested text configurations, and the conventions in which families differ (norms whose
weight is stored as w − 1, capped logits, scaled logits) are brought to one form here and nowhere else.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from speculators_core.errors import VerifierError
from speculators_core.types import Json, StrictModel
from speculators_core.verifier.families import Family, NormConvention, family_of

log = logging.getLogger(__name__)

_NESTED = ("text_config", "llm_config", "language_config")
_DEEPEST = 64  # configurations are half a dozen deep
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


class VerifierFacts(StrictModel):
    """Architecture of a verifier's text model; names follow transformers' config keys."""

    model_type: str = Field(description="Type of the text model (the nested one for multimodal checkpoints).")
    architectures: tuple[str, ...] = Field(description="Class names from the top of config.json.")
    hidden_size: int = Field(description="Width H of the residual stream.")
    vocab_size: int = Field(description="Rows V of the output head.")
    num_hidden_layers: int = Field(description="Number of decoder layers.")
    num_attention_heads: int = Field(description="Query heads.")
    num_key_value_heads: int = Field(description="Key and value heads.")
    head_dim: int = Field(description="Width of one attention head.")
    intermediate_size: int = Field(description="Width of the MLP.")
    rms_norm_eps: float = Field(description="Epsilon of the RMSNorms.")
    rope_parameters: dict[str, Any] = Field(description="rope_type, rope_theta and scaling keys, transformers-5 style.")
    max_position_embeddings: int = Field(description="Longest context in tokens.")
    hidden_act: str = Field(description="Activation of the MLP.")
    initializer_range: float = Field(description="Standard deviation of initial weights.")
    tie_word_embeddings: bool = Field(description="Whether the output head is the embedding matrix.")
    bos_token_id: int | None = Field(description="First token of a sequence, where the tokenizer has one.")
    eos_token_id: tuple[int, ...] = Field(description="Ids that end a reply: config.json and generation_config.json.")
    pad_token_id: int | None = Field(description="Padding id, where one is named.")
    norm_convention: NormConvention = Field(description="Final norm multiplies by w, or by 1 + w.")
    final_logit_softcap: float | None = Field(description="c in c·tanh(logits / c), or None.")
    logit_scale: float = Field(description="Factor on the head's output; 1/logits_scaling for Granite.")
    is_moe: bool = Field(description="Whether the MLPs are mixtures of experts.")
    latent_attention: bool = Field(description="Whether vLLM runs its attention as latent (MLA).")
    attention_bias: bool = Field(description="Biases in the attention projections.")
    mlp_bias: bool = Field(description="Biases in the MLP projections.")


def read_facts(verifier_dir: Path) -> VerifierFacts:
    """Read and normalise a verifier's facts; loads no weights, and imports transformers only for missing keys.

    Raises:
        VerifierError: not a model directory, unreadable or incomplete config.json, or a final norm that is no RMSNorm.
    """
    try:
        return _facts(verifier_dir)
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:  # a value of another type
        told = " ".join(str(error).split())
        raise VerifierError(
            f"{verifier_dir}/config.json or its generation_config.json holds what no model has: {told}",
            mend="copy the verifier again, or correct that value",
        ) from error


def _facts(verifier_dir: Path) -> VerifierFacts:
    top = read_config(verifier_dir)
    text = _text_config(top)
    model_type = str(text.get("model_type") or top.get("model_type") or "")
    if not model_type:
        raise VerifierError(f"{verifier_dir}/config.json names no model_type", mend="point at a transformers model")
    family = family_of(model_type) or Family(model_type, (model_type,))
    if family.refused:
        raise VerifierError(
            f"no draft can be trained for a verifier of type {model_type!r}: {family.refused}",
            mend="use a verifier of another family: `draftsmith support` lists them",
        )
    config = _Config(text, top, model_type, verifier_dir)
    heads = config.integer("num_attention_heads")
    hidden = config.integer("hidden_size")
    kv_heads = config.optional("num_key_value_heads")
    head_dim = config.optional("head_dim")
    # A config that names experts without an MLP width (Qwen3-MoE style) still needs a width for a dense draft.
    intermediate = config.optional("intermediate_size") or config.optional("moe_intermediate_size") or 4 * hidden
    generation = _read_json(verifier_dir / "generation_config.json") or {}
    ends = (*_ids(config.optional("eos_token_id")), *_ids(generation.get("eos_token_id")))
    return VerifierFacts(
        model_type=model_type,
        architectures=tuple(top.get("architectures") or text.get("architectures") or ()),
        hidden_size=hidden,
        vocab_size=config.integer("vocab_size"),
        num_hidden_layers=_depth(config),
        num_attention_heads=heads,
        num_key_value_heads=int(kv_heads or heads),
        head_dim=int(head_dim or hidden // heads),
        intermediate_size=int(intermediate),
        rms_norm_eps=_first_float(config, ("rms_norm_eps", "norm_eps", "layer_norm_epsilon"), 1e-6),
        rope_parameters=_rope(config),
        max_position_embeddings=int(config.optional("max_position_embeddings") or 2048),
        hidden_act=str(config.optional("hidden_act") or config.optional("hidden_activation") or "silu"),
        initializer_range=float(config.optional("initializer_range") or 0.02),
        tie_word_embeddings=_tied(config, top),
        bos_token_id=next(iter(_ids(config.optional("bos_token_id"))), None),
        eos_token_id=tuple(dict.fromkeys(ends)),
        pad_token_id=next(iter(_ids(config.optional("pad_token_id"))), None),
        norm_convention=family.norm,
        final_logit_softcap=_softcap(config, family),
        logit_scale=_logit_scale(config, family),
        is_moe=_has_experts(config),
        latent_attention=family.latent and config.written("kv_lora_rank") is not None,
        attention_bias=bool(config.written("attention_bias") or config.written("qkv_bias")),
        mlp_bias=bool(config.written("mlp_bias")),
    )


def read_config(verifier_dir: Path) -> dict[str, Any]:
    """config.json as a dictionary.

    Raises:
        VerifierError: the directory or its config.json does not exist, or is not a JSON object.
    """
    mend = "name the directory that holds the verifier's config.json and model.safetensors"
    if not verifier_dir.exists():
        raise VerifierError(f"the verifier directory {verifier_dir} does not exist", mend=mend)
    if not verifier_dir.is_dir():
        raise VerifierError(f"{verifier_dir} is a file, not a model directory", mend=mend)
    config = _read_json(verifier_dir / "config.json")
    if config is None:
        raise VerifierError(f"{verifier_dir} is not a model directory: it has no config.json", mend=mend)
    return config


def parse_object(content: bytes, where: str) -> dict[str, Any]:
    """Content of one of a verifier's JSON files.

    Raises:
        VerifierError: not JSON, no object, or what nobody could walk through or write again: nested beyond all
            configurations, or with half of a surrogate pair.
    """
    try:
        value = json.loads(content)
        _require_plain(value)
    except (ValueError, RecursionError) as error:
        raise VerifierError(f"{where} is not valid JSON: {error}", mend="copy the verifier again") from error
    if not isinstance(value, dict):
        raise VerifierError(f"{where} holds no JSON object", mend="copy the verifier again")
    return value


def _require_plain(value: Any, depth: int = 0) -> None:
    if depth > _DEEPEST:
        raise ValueError(f"nested more than {_DEEPEST} deep")
    if isinstance(value, str):
        value.encode()  # UnicodeEncodeError, a ValueError
    elif isinstance(value, dict | list):
        for part in (*value, *value.values()) if isinstance(value, dict) else value:
            _require_plain(part, depth + 1)


class _Config:
    """Look-up in the text config, then the top level, then transformers' defaults for the family."""

    def __init__(self, text: Mapping[str, Any], top: Mapping[str, Any], model_type: str, where: Path) -> None:
        self.text, self.top, self.model_type, self.where = text, top, model_type, where
        self._defaults: Mapping[str, Any] | None = None

    def written(self, key: str) -> Any:
        """The value in config.json (text model first), or None."""
        value = self.text.get(key)
        return self.top.get(key) if value is None else value

    def optional(self, key: str) -> Any:
        """The written value; when the key stands nowhere, the family's default; else None."""
        if key in self.text or key in self.top:
            return self.written(key)
        return self.defaults().get(key)

    def integer(self, key: str) -> int:
        """A value without which nothing can be built."""
        value = self.optional(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise VerifierError(
                f"{self.where}/config.json: {key} is {value!r}, not a positive whole number",
                mend="point at a text (or multimodal) language model in transformers' format",
            )
        return value

    def defaults(self) -> Mapping[str, Any]:
        """The family's defaults. Older transformers left defaults out of config.json, newer ones write them."""
        if self._defaults is None:
            from transformers.models.auto.configuration_auto import CONFIG_MAPPING

            known = self.model_type in CONFIG_MAPPING
            self._defaults = CONFIG_MAPPING[self.model_type]().to_dict() if known else {}
        return self._defaults


def _text_config(top: Mapping[str, Any]) -> Mapping[str, Any]:
    for key in _NESTED:
        nested = top.get(key)
        if isinstance(nested, dict) and nested:
            return nested
    return top


def _rope(config: _Config) -> dict[str, Any]:
    """rope settings as one flat dictionary with rope_type and rope_theta."""
    found = config.written("rope_parameters") or config.written("rope_scaling") or {}
    if found and all(isinstance(value, dict) for value in found.values()):  # one dictionary per layer type
        found = found.get("full_attention") or next(iter(found.values()))
    rope = {key: value for key, value in found.items() if not key.startswith("mrope") and value is not None}
    kind = rope.pop("type", None)
    rope["rope_type"] = rope.get("rope_type") or kind or "default"
    if rope["rope_type"] == "mrope":  # text positions are equal on all three axes: the plain rotation
        rope["rope_type"] = "default"
    theta = rope.get("rope_theta") or config.written("rope_theta")
    if theta is None:
        nested = config.defaults().get("rope_parameters") or {}
        theta = nested.get("rope_theta") or config.defaults().get("rope_theta") or 10000.0
    rope["rope_theta"] = float(theta)
    partial = config.written("partial_rotary_factor")
    if partial is not None and "partial_rotary_factor" not in rope:
        rope["partial_rotary_factor"] = float(partial)
    return dict(sorted(rope.items()))


def _tied(config: _Config, top: Mapping[str, Any]) -> bool:
    # transformers ties by the outer model's flag where a multimodal config has one, whatever the nested one says.
    for source in (top, config.text):
        if source.get("tie_word_embeddings") is not None:
            return bool(source["tie_word_embeddings"])
    return bool(config.defaults().get("tie_word_embeddings"))


def _depth(config: _Config) -> int:
    """Number of decoder layers; hybrids may list their kinds instead."""
    kinds = config.written("layers_block_type")
    if config.written("num_hidden_layers") is None and kinds:
        return len(kinds)
    return config.integer("num_hidden_layers")


def _has_experts(config: _Config) -> bool:
    kinds = config.written("layers_block_type")  # a hybrid names its experts' width though it may have none
    if kinds:
        return "moe" in kinds
    return any(int(config.written(key) or 0) > 1 for key in _EXPERT_COUNTS)


def _softcap(config: _Config, family: Family) -> float | None:
    # Asking transformers for every other family's default would cost an import for nothing.
    value = config.optional(family.softcap) if family.softcap else config.written("final_logit_softcapping")
    return float(value) if value else None


def _logit_scale(config: _Config, family: Family) -> float:
    """Factor on the logits: the family's own keys, and `logit_scale`, which vLLM's Llama reads of any config."""
    scale = float(config.written("logit_scale") or 1.0)
    for key in family.times:
        scale *= float(config.optional(key) or 1.0)
    for key in family.over:
        scale /= float(config.optional(key) or 1.0)
    return scale


def _first_float(config: _Config, keys: tuple[str, ...], default: float) -> float:
    for key in keys:
        if config.written(key) is not None:
            return float(config.written(key))
    for key in keys:
        if config.defaults().get(key) is not None:
            return float(config.defaults()[key])
    return default


def _ids(value: Json | object) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(item) for item in value) if isinstance(value, list | tuple) else (int(str(value)),)


def _read_json(path: Path) -> dict[str, Any] | None:
    return parse_object(path.read_bytes(), str(path)) if path.is_file() else None
