"""Native multi-token heads of verifiers: where their tensors lie, and how vLLM runs them.

Everything that differs between families is data here. The decoder layer of a head is the library's own of that family.
Sources are files of vLLM 0.32 under `vllm/model_executor/models/`, and the classes of transformers 5.19.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from speculators_core.formats.native_head import JOINTS

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Family:
    """One kind of head.

    model_types, architectures: of the verifiers that carry it; an empty list leaves that open ·
    config_type: transformers' model type of its decoder layer ("" for the verifier's own) ·
    modeling, prefix: module, and beginning of the class names, of the library's layer, norm and rotation ·
    layer: beginning of the layer's tensor names in the verifier, `{depth}` its number of decoder layers ·
    joints: names of JOINTS in the verifier ·
    hidden_first: input_proj reads (state, embedding), not (embedding, state) ·
    fed_normed: serving feeds the verifier's state after its final norm ·
    recycles_normed: the next step is fed the head's state after the last norm ·
    blanks_first: the embedding at position 0 is zero ·
    source: where vLLM says so.
    """

    name: str
    model_types: tuple[str, ...]
    modeling: str
    prefix: str
    layer: str
    joints: Mapping[str, str]
    source: str
    architectures: tuple[str, ...] = ()
    config_type: str = ""
    rotary: str = "RotaryEmbedding"
    hidden_first: bool = False
    fed_normed: bool = True
    recycles_normed: bool = True
    blanks_first: bool = True

    def part(self, suffix: str) -> type[nn.Module]:
        """The library's class of that suffix."""
        found: type[nn.Module] = getattr(import_module(f"transformers.models.{self.modeling}"), self.prefix + suffix)
        return found

    def native_name(self, name: str, depth: int) -> str:
        """Our tensor name (`input_proj.weight`, `layer.mlp.…`) in the verifier's checkpoint."""
        first, _, rest = name.partition(".")
        if first == "layer":
            return self.layer.format(depth=depth) + rest
        return f"{self.joints[first].format(depth=depth)}.{rest}"


_QWEN = {
    "token_layernorm": "mtp.pre_fc_norm_embedding",
    "hidden_layernorm": "mtp.pre_fc_norm_hidden",
    "input_proj": "mtp.fc",
    "final_layernorm": "mtp.norm",
}
_DEEPSEEK = {
    "token_layernorm": "model.layers.{depth}.enorm",
    "hidden_layernorm": "model.layers.{depth}.hnorm",
    "input_proj": "model.layers.{depth}.eh_proj",
    "final_layernorm": "model.layers.{depth}.shared_head.norm",
}

_QWEN3_5 = Family(
    name="qwen3_5",
    model_types=("qwen3_5_text", "qwen3_5"),
    config_type="qwen3_5_text",
    modeling="qwen3_5.modeling_qwen3_5",
    prefix="Qwen3_5",
    rotary="TextRotaryEmbedding",
    layer="mtp.layers.0.",
    joints=_QWEN,
    blanks_first=False,
    source="qwen3_5.py: Qwen3_5Model.forward; qwen3_5_mtp.py: Qwen3_5MultiTokenPredictor.forward",
)

FAMILIES: tuple[Family, ...] = (
    Family(
        name="qwen3_next",
        model_types=("qwen3_next",),
        modeling="qwen3_next.modeling_qwen3_next",
        prefix="Qwen3Next",
        layer="mtp.layers.0.",
        joints=_QWEN,
        blanks_first=False,
        source="qwen3_next.py: Qwen3NextModel.forward; qwen3_next_mtp.py: Qwen3NextMultiTokenPredictor.forward",
    ),
    _QWEN3_5,
    replace(
        _QWEN3_5,
        name="qwen3_5_moe",
        model_types=("qwen3_5_moe_text", "qwen3_5_moe"),
        config_type="qwen3_5_moe_text",
        modeling="qwen3_5_moe.modeling_qwen3_5_moe",
        prefix="Qwen3_5Moe",
    ),
    Family(
        name="mimo",
        model_types=("mimo", "qwen2"),
        architectures=("MiMoForCausalLM",),
        config_type="qwen2",
        modeling="qwen2.modeling_qwen2",
        prefix="Qwen2",
        layer="model.mtp_layers.0.",
        joints={joint: f"model.mtp_layers.0.{joint}" for joint in JOINTS},
        hidden_first=True,
        fed_normed=False,  # MiMoModel.forward ends before its norm, which stands in compute_logits
        source="mimo.py: MiMoModel.forward; mimo_mtp.py: MiMoMultiTokenPredictorLayer.forward",
    ),
    Family(
        name="glm4_moe",
        model_types=("glm4_moe",),
        modeling="glm4_moe.modeling_glm4_moe",
        prefix="Glm4Moe",
        layer="model.layers.{depth}.",
        joints=_DEEPSEEK,
        recycles_normed=False,
        source="glm4_moe.py: Glm4MoeModel.forward; glm4_moe_mtp.py: Glm4MoeMultiTokenPredictorLayer.forward",
    ),
    Family(
        name="deepseek_v3",
        model_types=("deepseek_v3",),
        modeling="deepseek_v3.modeling_deepseek_v3",
        prefix="DeepseekV3",
        layer="model.layers.{depth}.",
        joints=_DEEPSEEK,
        source="deepseek_v2.py: DeepseekV2Model.forward; deepseek_mtp.py: DeepSeekMultiTokenPredictorLayer.forward",
    ),
)


def family_of(model_type: str, architectures: tuple[str, ...]) -> Family | None:
    """The family of a verifier's text model, None where none is known."""
    for family in FAMILIES:
        if family.architectures and not set(family.architectures) & set(architectures):
            continue
        if model_type in family.model_types:
            return family
    return None


def layer_config(family: Family, text: Mapping[str, Any]) -> Any:
    """transformers' configuration of the head's decoder layer, from the verifier's own text configuration."""
    from transformers import AutoConfig

    values = {key: value for key, value in text.items() if key not in ("model_type", "architectures", "torch_dtype")}
    return AutoConfig.for_model(family.config_type or str(text["model_type"]), **values)
