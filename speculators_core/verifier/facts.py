"""What a draft must know of its verifier's architecture, read from config.json alone.

Two styles of rope settings, nested text configurations, and the conventions in which families differ (norms whose
weight is stored as w − 1, capped logits, scaled logits) are brought to one form here and nowhere else.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from speculators_core.errors import VerifierError
from speculators_core.types import Json, StrictModel

log = logging.getLogger(__name__)

# Families whose final RMSNorm multiplies by 1 + w. Read off the norm classes in transformers 5.19 and vLLM 0.32
# (GemmaRMSNorm); gemma3n and gemma4 returned to the plain form. Nested text types are listed by their own name.
ONE_PLUS_FAMILIES = frozenset(
    {
        "gemma", "gemma2", "gemma3", "gemma3_text", "paligemma", "vaultgemma", "recurrent_gemma", "rnj1",
        "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text",
        "step3p5", "step3p7", "minimax_m3_vl", "minimax_m3_vl_text",
    }
)  # fmt: skip

# Families whose final norm is a LayerNorm: a frozen RMSNorm would mis-scale every training target.
LAYER_NORM_FAMILIES = frozenset(
    {
        "bloom", "cohere", "cohere2", "cohere2_moe", "dbrx", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox",
        "gptj", "mpt", "nemotron", "olmo", "opt", "persimmon", "phi", "phimoe", "stablelm", "starcoder2",
    }
)  # fmt: skip

_NESTED = ("text_config", "llm_config", "language_config")
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
    norm_convention: Literal["plain", "one_plus"] = Field(description="Final norm multiplies by w, or by 1 + w.")
    final_logit_softcap: float | None = Field(description="c in c·tanh(logits / c), or None.")
    logit_scale: float = Field(description="Factor on the head's output; 1/logits_scaling for Granite.")
    is_moe: bool = Field(description="Whether the MLPs are mixtures of experts.")
    attention_bias: bool = Field(description="Biases in the attention projections.")
    mlp_bias: bool = Field(description="Biases in the MLP projections.")


def read_facts(verifier_dir: Path) -> VerifierFacts:
    """Read and normalise a verifier's facts; loads no weights, and imports transformers only for missing keys.

    Raises:
        VerifierError: not a model directory, unreadable or incomplete config.json, or a final norm that is no RMSNorm.
    """
    top = read_config(verifier_dir)
    text = _text_config(top)
    model_type = str(text.get("model_type") or top.get("model_type") or "")
    if not model_type:
        raise VerifierError(f"{verifier_dir}/config.json names no model_type", mend="point at a transformers model")
    if model_type in LAYER_NORM_FAMILIES:
        raise VerifierError(
            f"verifiers of type {model_type!r} end in a LayerNorm; training targets are formed with an RMSNorm",
            mend="use a verifier with a final RMSNorm (Llama, Qwen, Mistral, Gemma, Granite and their kin)",
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
        num_hidden_layers=config.integer("num_hidden_layers"),
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
        norm_convention="one_plus" if model_type in ONE_PLUS_FAMILIES else "plain",
        final_logit_softcap=_softcap(config),
        logit_scale=_logit_scale(config, hidden),
        is_moe=any(int(config.written(key) or 0) > 1 for key in _EXPERT_COUNTS),
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
    # transformers ties by the outer model's flag where a multimodal config has one.
    for source in (config.text, top):
        if source.get("tie_word_embeddings") is not None:
            return bool(source["tie_word_embeddings"])
    return bool(config.defaults().get("tie_word_embeddings"))


def _softcap(config: _Config) -> float | None:
    # Only Gemma's kin cap by default; asking transformers for every other family would cost an import for nothing.
    asked = "gemma" in config.model_type or config.model_type == "nanochat"
    value = config.optional("final_logit_softcapping") if asked else config.written("final_logit_softcapping")
    return float(value) if value else None


def _logit_scale(config: _Config, hidden_size: int) -> float:
    """Factor on the logits: granite divides, hyperclovax multiplies, cohere and falcon_h1 have keys of their own."""
    scale = float(config.written("logit_scale") or 1.0)
    family = config.model_type
    if family.startswith("granite"):
        scale /= float(config.optional("logits_scaling") or 1.0)
    elif family.startswith("hyperclovax"):
        scale *= float(config.optional("logits_scaling") or 1.0)
    elif family == "falcon_h1":
        scale *= float(config.optional("lm_head_multiplier") or 1.0)
    elif family.startswith("minicpm") and config.written("dim_model_base"):
        scale *= float(config.written("dim_model_base")) / hidden_size
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
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise VerifierError(f"{path} is not valid JSON: {error}", mend="copy the verifier again") from error
    if not isinstance(value, dict):
        raise VerifierError(f"{path} holds no JSON object", mend="copy the verifier again")
    return value
