"""What families of verifiers differ in between the last hidden state and the logits: one table, as data.

Read off the classes of transformers 5.19 and vLLM 0.32; `tests/unit/speculators_core/verifier/test_families.py` holds
each line against a tiny model of transformers' own. A family that is not listed ends as Llama does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

NormConvention = Literal["plain", "one_plus"]


@dataclass(frozen=True)
class Family:
    """Text models that end alike.

    model_types: of text models, and of the multimodal models around them ·
    norm: the final RMSNorm multiplies by w, or by 1 + w ·
    softcap: key of c in c·tanh(logits / c), "" where logits are not capped ·
    times, over: keys whose values multiply and divide the logits, before the cap ·
    latent: with a `kv_lora_rank` its attention is latent (MLA) in vLLM, which then hands out no states
        (`is_deepseek_mla` in vllm/transformers_utils/model_arch_config_convertor.py) ·
    refused: why no draft can be trained for it, "" where one can.
    """

    name: str
    model_types: tuple[str, ...]
    norm: NormConvention = "plain"
    softcap: str = ""
    times: tuple[str, ...] = ()
    over: tuple[str, ...] = ()
    latent: bool = False
    refused: str = ""

    def describe(self) -> str:
        """How it ends, in words."""
        if self.refused:
            return f"refused: {self.refused}"
        words = {"plain": "RMSNorm", "one_plus": "RMSNorm by 1 + w"}[self.norm]
        words += "".join(f", logits times {key}" for key in self.times)
        words += "".join(f", logits over {key}" for key in self.over)
        return words + (f", logits capped by {self.softcap}" if self.softcap else "")


# fmt: off
FAMILIES: tuple[Family, ...] = (
    Family("Llama", ("llama",)),
    Family("Llama 4", ("llama4", "llama4_text")),
    Family("Mistral", ("mistral", "mistral3", "ministral", "ministral3", "mixtral")),
    Family("Qwen 2", ("qwen2", "qwen2_moe")),
    Family("Qwen 3", ("qwen3", "qwen3_moe")),
    Family(
        "Qwen 3-Next and 3.5",
        ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
        norm="one_plus",
    ),
    Family(
        "Qwen-VL",
        (
            "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text",
            "qwen3_vl", "qwen3_vl_text", "qwen3_vl_moe", "qwen3_vl_moe_text",
        ),
    ),
    Family(
        "Gemma 1 to 3",
        ("gemma", "gemma2", "gemma3", "gemma3_text", "paligemma", "vaultgemma", "rnj1"),
        norm="one_plus",
        softcap="final_logit_softcapping",
    ),
    Family("RecurrentGemma", ("recurrent_gemma",), norm="one_plus", softcap="logits_soft_cap"),
    Family("Gemma 4", ("gemma4", "gemma4_text"), softcap="final_logit_softcapping"),
    Family(
        "Gemma 3n",
        ("gemma3n", "gemma3n_text"),
        refused="its residual stream is several streams, joined only behind the last layer",
    ),
    Family("gpt-oss", ("gpt_oss",)),
    Family(
        "Granite",
        (
            "granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared",
            "granite4_vision",
        ),
        over=("logits_scaling",),
    ),
    Family("GLM", ("glm", "glm4", "glm4_moe", "glm4v", "glm4v_text", "glm4v_moe", "glm4v_moe_text", "glm46v")),
    Family("GLM with latent attention", ("glm4_moe_lite", "glm_moe_dsa"), latent=True),
    Family("Nemotron-H", ("nemotron_h",)),
    Family("DeepSeek", ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25"), latent=True),
    Family("other latent attention", ("axk1", "kimi_linear", "longcat_flash", "pangu_ultra_moe", "hy_v4"), latent=True),
    Family("HyperCLOVA X", ("hyperclovax", "hyperclovax_vision_v2"), times=("logits_scaling",)),
    Family("Falcon-H1", ("falcon_h1",), times=("lm_head_multiplier",)),
    Family("MiniCPM", ("minicpm", "minicpm3"), times=("dim_model_base",), over=("hidden_size",)),
    Family("nanochat", ("nanochat",), softcap="final_logit_softcapping"),
    Family("others by 1 + w", ("step3p5", "step3p7", "minimax_m3_vl", "minimax_m3_vl_text"), norm="one_plus"),
    Family(
        "models that end in a LayerNorm",
        (
            "bloom", "cohere", "cohere2", "cohere2_moe", "dbrx", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox",
            "gptj", "mpt", "nemotron", "olmo", "opt", "persimmon", "phi", "phimoe", "stablelm", "starcoder2",
        ),
        refused="it ends in a LayerNorm, and an RMSNorm in its place would mis-scale every training target",
    ),
)
# fmt: on

_BY_TYPE = {model_type: family for family in FAMILIES for model_type in family.model_types}


def family_of(model_type: str) -> Family | None:
    """The family of a model type, None where none is listed."""
    return _BY_TYPE.get(model_type)
