"""The shape of a draft's decoder layers: one value that the module, config.json and the engine agree on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from speculators_core.errors import ConfigError
from speculators_core.types import StrictModel

if TYPE_CHECKING:
    from speculators_core.verifier.facts import VerifierFacts

LayerStyle = Literal["llama", "qwen3"]
SLIDING, FULL = "sliding_attention", "full_attention"


class LayerGeometry(StrictModel):
    """Dimensions of the decoder layers and of the embeddings around them."""

    style: LayerStyle = Field(description="llama, or qwen3 with RMS-normed query and key heads")
    vocab_size: int = Field(gt=0, description="the verifier's vocabulary V")
    hidden_size: int = Field(gt=0, description="H, the verifier's hidden size")
    intermediate_size: int = Field(gt=0, description="width of the gated feed-forward part")
    num_attention_heads: int = Field(gt=0, description="query heads")
    num_key_value_heads: int = Field(gt=0, description="key and value heads")
    head_dim: int = Field(gt=0, description="size of one head")
    layer_types: tuple[str, ...] = Field(min_length=1, description="sliding_attention or full_attention, one a layer")
    sliding_window: int | None = Field(description="keys that a sliding layer sees, itself included")
    rms_norm_eps: float = Field(gt=0, description="added to the mean square")
    rope_parameters: Mapping[str, Any] = Field(description="transformers' rope dictionary, one for all layers")
    max_position_embeddings: int = Field(gt=0, description="positions that the verifier was made for")
    initializer_range: float = Field(gt=0, description="standard deviation of fresh weights")
    bos_token_id: int | None = Field(default=None, description="copied for readers of the config")
    eos_token_id: tuple[int, ...] = Field(default=(), description="copied for readers of the config")
    pad_token_id: int | None = Field(default=None, description="copied for readers of the config")

    @property
    def num_layers(self) -> int:
        """Decoder layers of the draft."""
        return len(self.layer_types)

    def window(self, layer: int) -> int | None:
        """Window of a layer in keys, None where it sees everything."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    def to_transformers(self) -> dict[str, Any]:
        """The `transformer_layer_config` of config.json: a plain decoder configuration with its model_type."""
        sliding = SLIDING in self.layer_types
        common: dict[str, Any] = {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_id[0] if len(self.eos_token_id) == 1 else list(self.eos_token_id) or None,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": self.initializer_range,
            "intermediate_size": self.intermediate_size,
            "layer_types": list(self.layer_types),
            "max_position_embeddings": self.max_position_embeddings,
            "model_type": self.style,
            "num_attention_heads": self.num_attention_heads,
            "num_hidden_layers": self.num_layers,
            "num_key_value_heads": self.num_key_value_heads,
            "pad_token_id": self.pad_token_id,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": dict(self.rope_parameters),
            "sliding_window": self.sliding_window if sliding else None,
            "tie_word_embeddings": False,
            "use_cache": True,
            "use_sliding_window": sliding,
            "vocab_size": self.vocab_size,
        }
        if self.style == "llama":
            return {**common, "mlp_bias": False, "pretraining_tp": 1}
        return {**common, "max_window_layers": 28}


def geometry_for(
    facts: VerifierFacts,
    *,
    style: LayerStyle,
    num_layers: int,
    sliding_window: int | None,
    full_attention_layers: tuple[int, ...] = (),
    intermediate_size: int | None = None,
) -> LayerGeometry:
    """Give the draft the verifier's dimensions.

    Raises:
        ConfigError: layer indices out of range, or heads that do not divide.
    """
    outside = [index for index in full_attention_layers if not 0 <= index < num_layers]
    if outside:
        raise ConfigError(
            f"full_attention_layers names {outside}, but the draft has {num_layers} layers counted from 0",
            mend="name layers of the draft, not of the verifier",
        )
    heads, kv_heads = facts.num_attention_heads, facts.num_key_value_heads
    if facts.hidden_size % heads and facts.hidden_size % facts.head_dim == 0:
        heads = facts.hidden_size // facts.head_dim
        kv_heads = kv_heads if heads % kv_heads == 0 else heads
    if heads % kv_heads:
        raise ConfigError(
            f"{heads} query heads cannot share {kv_heads} key heads", mend="this verifier needs its own head counts"
        )
    sliding = sliding_window is not None
    return LayerGeometry(
        style=style,
        vocab_size=facts.vocab_size,
        hidden_size=facts.hidden_size,
        intermediate_size=intermediate_size or (3 * facts.hidden_size if facts.is_moe else facts.intermediate_size),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=facts.head_dim,
        layer_types=tuple(
            FULL if not sliding or index in full_attention_layers else SLIDING for index in range(num_layers)
        ),
        sliding_window=sliding_window,
        rms_norm_eps=facts.rms_norm_eps,
        rope_parameters=_own_rope(facts),
        max_position_embeddings=facts.max_position_embeddings,
        initializer_range=facts.initializer_range,
        bos_token_id=facts.bos_token_id,
        eos_token_id=facts.eos_token_id,
        pad_token_id=facts.pad_token_id,
    )


def _own_rope(facts: VerifierFacts) -> dict[str, Any]:
    """The verifier's rotation, but for one of two tables: vLLM takes the one that the served context calls for
    (phi3_long_rope_scaled_rope.py), which training cannot know, and finds none for blocks. The draft turns plainly."""
    rope = flatten_rope(facts.rope_parameters)
    if rope["rope_type"] not in ("longrope", "su"):
        return rope
    return {"rope_type": "default", "rope_theta": rope["rope_theta"]}


def flatten_rope(parameters: Any) -> dict[str, Any]:
    """One rotation for all layers of the draft: verifiers with one per layer type give the sliding one.

    A partial rotary factor is dropped, since the draft turns whole heads, and so is Gemma 4's way to turn a part of
    them ("proportional"); multi-axis sections are for images and the draft only reads text, where all axes agree.
    """
    rope = dict(parameters or {})
    for kind in (SLIDING, FULL):
        if isinstance(rope.get(kind), Mapping):
            rope = dict(rope[kind])
            break
    kind_of_rope = rope.get("rope_type", rope.get("type", "default"))
    for key in ("type", "partial_rotary_factor", "mrope_interleaved", "mrope_section"):
        rope.pop(key, None)
    rope["rope_type"] = "default" if kind_of_rope in ("mrope", "proportional") else kind_of_rope
    rope.setdefault("rope_theta", 10000.0)
    return rope
