"""Types of the keys that are read from a draft's config.json, in every layout: whoever reads one relies on them.

The file comes from anywhere. A wrong type is told here, once, and not by the arithmetic that trips over it; keys that
nobody reads may hold anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from speculators_core.errors import FormatError
from speculators_core.types import MOST_DRAFTED, MOST_TOKENS

Size = Annotated[int, Field(ge=0, le=2**31 - 1)]
TokenId = Annotated[int, Field(ge=-1, le=MOST_TOKENS)]
"""−1 is how some say that there is none."""
LayerId = Annotated[int, Field(ge=-1, le=2**16)]
"""−1 is the embedding's output where outputs are counted."""


class _Stated(BaseModel):
    """Whatever is stated has its type; null is as good as nothing, and other keys are let through."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


class _Rope(_Stated):
    rope_type: str | None = None
    type: str | None = None
    rope_theta: Annotated[float, Field(gt=0)] | None = None
    factor: Annotated[float, Field(gt=0)] | None = None


class _Knobs(_Stated):
    """Keys that stand at the top of one layout and in a section of another."""

    hidden_size: Size | None = None
    target_hidden_size: Size | None = None
    intermediate_size: Size | None = None
    vocab_size: Annotated[int, Field(ge=0, le=MOST_TOKENS)] | None = None
    draft_vocab_size: Annotated[int, Field(ge=0, le=MOST_TOKENS)] | None = None
    num_hidden_layers: Annotated[int, Field(ge=0, le=1024)] | None = None
    num_attention_heads: Size | None = None
    num_key_value_heads: Size | None = None
    num_aux_hidden_states: Size | None = None
    head_dim: Size | None = None
    rms_norm_eps: Annotated[float, Field(gt=0)] | None = None
    layer_types: list[str] | None = None
    sliding_window: Size | None = None
    hidden_act: str | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    rope_parameters: _Rope | None = None
    rope_scaling: _Rope | None = None
    rope_theta: Annotated[float, Field(gt=0)] | None = None
    max_position_embeddings: Size | None = None
    initializer_range: Annotated[float, Field(ge=0)] | None = None
    logit_scale: float | None = None
    bos_token_id: TokenId | None = None
    eos_token_id: TokenId | list[TokenId] | None = None
    pad_token_id: TokenId | None = None
    fc_norm: bool | None = None
    use_aux_norm: bool | None = None
    use_aux_hidden_state: bool | None = None
    norm_before_fc: bool | None = None
    norm_before_residual: bool | None = None
    norm_output: bool | None = None
    eagle_aux_hidden_state_layer_ids: list[LayerId] | None = None
    aux_hidden_state_layer_ids: list[LayerId] | None = None
    target_layer_ids: list[LayerId] | None = None
    mask_token_id: TokenId | None = None
    pard_token: TokenId | None = None
    ptd_token_id: TokenId | None = None
    block_size: Annotated[int, Field(ge=0, le=MOST_DRAFTED)] | None = None
    causal: bool | None = None
    is_causal: bool | None = None
    conv_kernel_size: Size | None = None
    conv_group_size: Size | None = None
    selector_rank: Size | None = None
    selector_top_k: Size | None = None
    markov_rank: Size | None = None
    markov_head_type: str | None = None
    enable_confidence_head: bool | None = None
    confidence_head_with_markov: bool | None = None


class _Proposal(_Stated):
    speculative_tokens: Annotated[int, Field(ge=1, le=MOST_DRAFTED)] | None = None


class _Verifier(_Stated):
    name_or_path: str | None = None
    architectures: list[str] | None = None


class _Section(_Stated):
    proposal_methods: list[_Proposal] | None = None
    verifier: _Verifier | None = None


class _Top(_Knobs):
    architectures: list[str] | None = None
    model_type: str | None = None
    speculators_model_type: str | None = None
    speculators_config: _Section | None = None
    transformer_layer_config: _Knobs | None = None
    dflash_config: _Knobs | None = None
    eagle_config: _Knobs | None = None


def check_types(config: Mapping[str, Any], where: str) -> None:
    """FormatError that names every key whose value has another type than its readers expect."""
    try:
        _Top.model_validate(config)
    except ValidationError as error:
        lines = dict.fromkeys(
            f"{'.'.join(map(str, problem['loc']))}: {problem['msg'].partition(' or instance of')[0]}"
            for problem in error.errors()
        )
        raise FormatError(f"{where}: {'; '.join(lines)}", mend="copy the draft's own config.json again") from None
