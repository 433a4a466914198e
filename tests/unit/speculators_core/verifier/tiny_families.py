"""Tiny, randomly initialised verifiers of many families, built from transformers' own configuration classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "intermediate_size_mlp": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 8, "vocab_size": 128,
    "max_position_embeddings": 128, "sliding_window": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    # experts
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "shared_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 16, "first_k_dense_replace": 1,
    # latent attention
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    # linear attention and state space layers
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "mamba_num_heads": 4, "mamba_head_dim": 16, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8,
    "mamba_d_ssm": 64, "ssm_state_size": 8, "n_groups": 1,
    # Gemma 4
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128, "num_kv_shared_layers": 0,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 32, "embed_dim": 32, "intermediate_size": 32, "num_hidden_layers": 2, "depth": 2, "image_size": 28,
    "num_attention_heads": 2, "num_key_value_heads": 2, "num_heads": 2, "head_dim": 16, "patch_size": 14,
    "out_hidden_size": 32, "projection_dim": 32, "vision_output_dim": 32, "fullatt_block_indexes": [0],
    "deepstack_visual_indexes": [0], "num_position_embeddings": 16, "global_head_dim": 16,
}  # fmt: skip
"""As many layers as the text model, so that the two lists cannot be told apart by their length."""


@dataclass(frozen=True)
class Tiny:
    """A verifier: `changes` of its text model's configuration, `outer` of the multimodal one around it, and what the
    facts must say beside the sizes."""

    model_type: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    outer: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""

    def build(self, directory: Path) -> Any:
        """The model, in float32 with weights that bfloat16 holds exactly, as saved to `directory`."""
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, __version__
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
        from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

        if self.model_type not in CONFIG_MAPPING:
            pytest.skip(f"transformers {__version__} has no {self.model_type}")
        multimodal = self.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        kind = AutoModelForImageTextToText if multimodal else AutoModelForCausalLM
        torch.manual_seed(0)
        model = kind.from_config(self._config(CONFIG_MAPPING[self.model_type]))
        model = model.to(torch.float32).eval().requires_grad_(False)
        for parameter in model.parameters():
            # norms away from 1 and 0, so that w and 1 + w can be told apart
            drawn = 0.2 * torch.randn_like(parameter)
            parameter.copy_((parameter + drawn if parameter.dim() == 1 else drawn).bfloat16())
        for table in (model.get_input_embeddings(), model.get_output_embeddings()):
            table.weight.copy_(torch.randn_like(table.weight).bfloat16())  # logits large enough to be capped
        model.save_pretrained(directory)
        return model

    def _config(self, kind: Any) -> Any:
        defaults = kind().to_dict()
        if not isinstance(defaults.get("text_config"), dict):
            return kind(**{**_shrunk(defaults, SIZES), **self.changes})
        text, vision = defaults["text_config"], defaults.get("vision_config")
        settings = {"text_config": {**_shrunk(text, SIZES), "model_type": text["model_type"], **self.changes}}
        if isinstance(vision, dict):
            settings["vision_config"] = {**_shrunk(vision, VISION), "model_type": vision["model_type"]}
        tokens = [key for key in defaults if key.endswith(("_token_id", "_token_index")) and key not in SIZES]
        return kind(**settings, **{key: 120 + place for place, key in enumerate(tokens)}, **self.outer)


def _shrunk(defaults: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in sizes.items() if key in defaults}


def some_tokens(count: int = 12) -> Tensor:
    """int64 [count], away from special ids."""
    return torch.arange(count) * 7 % 90 + 5


HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
EQUAL_HEADS = {"num_key_value_heads": 4}
M_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]}}

FAMILIES_HERE = (
    Tiny("llama", {"tie_word_embeddings": True}, {"tie_word_embeddings": True}),
    Tiny("llama4_text", facts={"is_moe": True}),
    Tiny("llama4", facts={"model_type": "llama4_text", "is_moe": True}),
    Tiny("mistral"),
    Tiny("mixtral", facts={"is_moe": True}),
    Tiny("mistral3", facts={"model_type": "mistral"}),
    Tiny("qwen2", {"tie_word_embeddings": True}, {"tie_word_embeddings": True}),
    Tiny("qwen2_moe", facts={"is_moe": True}),
    Tiny("qwen3"),
    Tiny("qwen3_moe", facts={"is_moe": True}),
    Tiny("qwen3_next", HYBRID, {"norm_convention": "one_plus", "is_moe": True, "partial": 0.25}),
    Tiny("qwen3_5", HYBRID, {"model_type": "qwen3_5_text", "norm_convention": "one_plus", "partial": 0.25}),
    Tiny("qwen3_5_moe_text", HYBRID, {"norm_convention": "one_plus", "is_moe": True, "partial": 0.25}),
    Tiny("qwen2_5_vl", M_ROPE),
    Tiny("qwen3_vl", M_ROPE),
    Tiny("qwen3_vl_moe", M_ROPE,
         {"is_moe": True}),
    Tiny("gemma2", {"final_logit_softcapping": 5.0}, {"norm_convention": "one_plus", "final_logit_softcap": 5.0}),
    Tiny("gemma3", facts={"model_type": "gemma3_text", "norm_convention": "one_plus", "tie_word_embeddings": True}),
    Tiny("gemma4_text", {"final_logit_softcapping": 5.0}, {"final_logit_softcap": 5.0, "partial": 0.25}),
    Tiny("recurrent_gemma", {"logits_soft_cap": 5.0},
         {"norm_convention": "one_plus", "final_logit_softcap": 5.0, "partial": 0.5}),
    Tiny("gpt_oss", facts={"is_moe": True, "attention_bias": True}),
    Tiny("granite", {"logits_scaling": 8.0}, {"logit_scale": 1 / 8}),
    Tiny("granitemoehybrid", {"logits_scaling": 8.0, "layer_types": ["mamba", "attention"]}, {"logit_scale": 1 / 8}),
    Tiny("glm4", facts={"partial": 0.5}),
    Tiny("glm4_moe", facts={"is_moe": True, "partial": 0.5}),
    Tiny("glm4v", M_ROPE, {"model_type": "glm4v_text"}),
    Tiny("nemotron_h", {"layers_block_type": ["mamba", "attention"]}, {"is_moe": False}),
    Tiny("nemotron_h", {"layers_block_type": ["attention", "moe"]}, {"is_moe": True}, name="nemotron_h with experts"),
    Tiny("deepseek_v2", EQUAL_HEADS, {"is_moe": True, "latent_attention": True}),
    Tiny("deepseek_v3", EQUAL_HEADS, {"is_moe": True, "latent_attention": True}),
    Tiny("glm4_moe_lite", EQUAL_HEADS, {"latent_attention": True}),
    Tiny("hyperclovax", {"logits_scaling": 0.5}, {"logit_scale": 0.5}),
    Tiny("falcon_h1", {"lm_head_multiplier": 0.25}, {"logit_scale": 0.25}),
    Tiny("minicpm3", {"dim_model_base": 8, **EQUAL_HEADS}, {"logit_scale": 0.25}),
)  # fmt: skip
