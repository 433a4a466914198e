"""Would vLLM load this draft? Its loader's rules, applied to config.json and tensors before an engine is started.

The expected tensors are worked out from config.json alone, as vLLM does, and not from our module: a disagreement
between the two is what this check is for. Rules read off vLLM 0.32 (`transformers_utils/configs/speculators`,
`models/llama_eagle3.py`, `models/qwen3_eagle3.py`; of blocks: `servable_blocks`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from speculators_core.errors import FormatError
from speculators_core.formats.config import (
    CONFIGS,
    FeatureDraftConfig,
    ParallelFeatureDraftConfig,
    SpeculatorConfig,
    SpeculatorsFormat,
)
from speculators_core.formats.native_head import check_native_head
from speculators_core.formats.servable_blocks import (
    corrected_draft_tensors,
    masked_draft_tensors,
    refined_draft_tensors,
    selecting_draft_tensors,
)
from speculators_core.formats.shapes import Shape, check_layer_config, layer_shapes
from speculators_core.types import ExportedDraft

if TYPE_CHECKING:
    from torch import Tensor

DEFAULT_FEATURES = 3
"""Features that vLLM's llama class assumes where the layer config does not say."""

OPTIONAL = ("mask_embedding",)
"""Tensors that a draft may lack: vLLM skips this one, and reads it from a file of its own."""


def parse_config(config: Mapping[str, Any]) -> SpeculatorsFormat:
    """The typed config.json; FormatError says which key is wrong."""
    kind = config.get("speculators_model_type")
    if "model_type" in config:
        raise FormatError(
            "config.json has a top-level model_type, so vLLM would not take it for a speculator", mend="remove it"
        )
    if kind not in CONFIGS:
        raise FormatError(f"config.json: speculators_model_type {kind!r} is not one of {', '.join(CONFIGS)}")
    known = {key: value for key, value in config.items() if key not in ("auto_map", "torch_dtype")}
    try:
        return CONFIGS[kind].model_validate(known)
    except ValidationError as error:
        lines = "; ".join(
            f"{'.'.join(map(str, problem['loc'])) or 'config'}: {problem['msg']}" for problem in error.errors()
        )
        raise FormatError(f"config.json: {lines}", mend="export the draft again") from None


def check_servable(draft: ExportedDraft) -> None:
    """Raise a FormatError that names everything vLLM would trip over (or misread in silence)."""
    config = parse_config(draft.config)
    problems: list[str] = []
    if isinstance(config, SpeculatorConfig):
        expected = _EXPECTED[config.speculators_model_type](config, problems)
        _compare(draft.tensors, expected, problems)
        if not problems:
            _check_vocabulary(draft.tensors, config, problems)
    else:
        check_native_head(draft.tensors, problems)
    if problems:
        raise FormatError(
            "vLLM would not serve this draft: " + "; ".join(problems), mend="export the draft again from its run"
        )


def _feature_draft_tensors(config: SpeculatorConfig, problems: list[str]) -> dict[str, Shape]:
    assert isinstance(config, FeatureDraftConfig)
    layer = config.transformer_layer_config
    style = layer["model_type"]
    if style not in ("llama", "qwen3"):
        problems.append(f"model_type {style!r} of the layers is neither llama nor qwen3")
        return {}
    if not check_layer_config(layer, problems):
        return {}
    features = len(config.eagle_aux_hidden_state_layer_ids)
    assumed = layer.get("num_aux_hidden_states", DEFAULT_FEATURES if style == "llama" else features)
    if assumed != features:
        problems.append(
            f"vLLM would size fc for {assumed} features, not {features}: set num_aux_hidden_states in the layer config"
        )
    hidden, vocab, draft_vocab = layer["hidden_size"], layer["vocab_size"], config.draft_vocab_size
    width = config.target_hidden_size or hidden
    tensors: dict[str, Shape] = {
        "embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (draft_vocab, hidden),
        "fc.weight": (hidden, features * width),
        "norm.weight": (hidden,),
        "layers.0.hidden_norm.weight": (hidden,),
    }
    if draft_vocab != vocab:  # vLLM makes room for d2t on inequality only, and refuses it otherwise
        tensors |= {"d2t": (draft_vocab,), "t2d": (vocab,)}
    if config.norm_before_fc:
        tensors["input_norm.weight"] = (features * width,)
    if config.fc_norm:
        tensors |= {f"fc_norm.{index}.weight": (width,) for index in range(features)}
    for index in range(layer["num_hidden_layers"]):
        rows = 2 * hidden if index == 0 else hidden
        tensors |= layer_shapes(layer, index, rows, normed_heads=style == "qwen3")
    return tensors


def _continuing_draft_tensors(config: SpeculatorConfig, problems: list[str]) -> dict[str, Shape]:
    assert isinstance(config, FeatureDraftConfig)
    if config.embed_requires_grad:
        problems.append("embed_requires_grad is set, but the embedding is the verifier's")
    return _feature_draft_tensors(config, problems)


def _parallel_draft_tensors(config: SpeculatorConfig, problems: list[str]) -> dict[str, Shape]:
    assert isinstance(config, ParallelFeatureDraftConfig)
    tensors = _feature_draft_tensors(config, problems)
    layer = config.transformer_layer_config
    if config.fc_norm and layer.get("fc_norm") is not True:  # `update_peagle` hands on neither this nor norm_output
        problems.append("vLLM reads fc_norm of this method from the layer config alone: set it there")
    if config.mask_token_id >= layer.get("vocab_size", 0):
        problems.append(f"mask_token_id {config.mask_token_id} lies outside the vocabulary")
    if tensors:
        tensors["mask_hidden"] = (1, 1, tensors["fc.weight"][1])
    return tensors


_EXPECTED: dict[str, Callable[[SpeculatorConfig, list[str]], dict[str, Shape]]] = {
    "dflash": masked_draft_tensors,
    "dflash2": selecting_draft_tensors,
    "dspark": corrected_draft_tensors,
    "eagle3": _continuing_draft_tensors,
    "xpress": refined_draft_tensors,
    "peagle": _parallel_draft_tensors,
}


def _compare(tensors: Mapping[str, Tensor], expected: Mapping[str, Shape], problems: list[str]) -> None:
    import torch

    if not expected:
        return
    problems += [f"{name} is missing" for name in sorted(expected.keys() - tensors.keys() - set(OPTIONAL))]
    problems += [f"{name} is unknown to vLLM" for name in sorted(tensors.keys() - expected.keys())]
    for name in sorted(expected.keys() & tensors.keys()):
        tensor = tensors[name]
        dtype = {"d2t": torch.int64, "t2d": torch.bool}.get(name, torch.bfloat16)
        if tuple(tensor.shape) != expected[name]:
            problems.append(f"{name} is {list(tensor.shape)}, vLLM wants {list(expected[name])}")
        elif tensor.dtype != dtype:
            problems.append(f"{name} is {tensor.dtype}, vLLM wants {dtype}")
        elif dtype == torch.bfloat16 and not bool(torch.isfinite(tensor).all()):
            problems.append(f"{name} holds values that are not finite")


def _check_vocabulary(tensors: Mapping[str, Tensor], config: SpeculatorConfig, problems: list[str]) -> None:
    import torch

    if "d2t" not in tensors:
        return
    ids = torch.arange(config.draft_vocab_size) + tensors["d2t"]
    if not torch.equal(ids, tensors["t2d"].nonzero().squeeze(1)):
        problems.append("d2t and t2d disagree: d2t must hold the distances id - index of the tokens that t2d marks")


__all__ = ["check_servable", "parse_config"]
