"""Facts come out in one form whatever a family's config looks like."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from speculators_core.errors import VerifierError
from speculators_core.verifier.facts import VerifierFacts, read_facts
from speculators_core.verifier.families import family_of

LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "vocab_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "intermediate_size": 128, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "max_position_embeddings": 512,
    "hidden_act": "silu", "initializer_range": 0.01, "tie_word_embeddings": False, "bos_token_id": 1,
    "eos_token_id": [2, 3], "pad_token_id": None,
}  # fmt: skip


def facts(tmp_path: Path, *, drop: tuple[str, ...] = (), **changes: Any) -> VerifierFacts:
    config = {key: value for key, value in LLAMA.items() if key not in drop} | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    return read_facts(tmp_path)


def test_plain_llama(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 7]}))
    read = facts(tmp_path)
    assert read.head_dim == 32 and read.num_key_value_heads == 2 and read.pad_token_id is None
    assert read.eos_token_id == (2, 3, 7), "an engine also stops at the generation config's ids"
    assert read.norm_convention == "plain" and read.logit_scale == 1.0 and read.final_logit_softcap is None
    assert not read.is_moe and not read.attention_bias and read.rms_norm_eps == 1e-5


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0},
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}, "rope_theta": 1.0},
            {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0},
        ),
        (
            {
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                }
            },
            {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        ),
        (
            {"rope_scaling": {"type": "mrope", "mrope_section": [1, 2, 3]}, "rope_theta": 1e6},
            {"rope_type": "default", "rope_theta": 1e6},
        ),
        (
            {"rope_theta": 1e4, "partial_rotary_factor": 0.25},
            {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
        ),
    ],
)
def test_both_styles_of_rope_settings(tmp_path: Path, changes: dict[str, Any], expected: dict[str, Any]) -> None:
    assert facts(tmp_path, drop=("rope_theta",), **changes).rope_parameters == expected


def test_nested_text_configs(tmp_path: Path) -> None:
    text = {key: value for key, value in LLAMA.items() if key != "architectures"} | {"model_type": "gemma3_text"}
    outer = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    read = read_facts(tmp_path)
    assert read.model_type == "gemma3_text" and read.hidden_size == 64 and read.norm_convention == "one_plus"
    assert read.architectures == ("Gemma3ForConditionalGeneration",)


@pytest.mark.parametrize(
    "family", ["gemma", "gemma2", "gemma3_text", "vaultgemma", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"]
)
def test_one_plus_norms_are_what_transformers_computes(family: str) -> None:
    """Against the norm class itself, so that a family that changes its mind is noticed."""
    import importlib
    import inspect

    module_name = family.removesuffix("_text")
    module = importlib.import_module(f"transformers.models.{module_name}.modeling_{module_name}")
    norms = [kind for name, kind in inspect.getmembers(module, inspect.isclass) if name.endswith("RMSNorm")]
    import torch

    norm = next(kind for kind in norms if kind.__module__ == module.__name__)(4)
    with torch.no_grad():
        norm.weight.zero_()
        output = norm(torch.tensor([[1.0, -1.0, 1.0, -1.0]]))
    assert output.abs().sum() > 3.9, "1 + w with w = 0 is the identity on a normalised vector"
    found = family_of(family)
    assert found is not None and found.norm == "one_plus"


@pytest.mark.parametrize(
    ("changes", "scale"),
    [
        ({"model_type": "granite", "logits_scaling": 8.0}, 1 / 8),
        ({"model_type": "hyperclovax", "logits_scaling": 0.5}, 0.5),
        ({"model_type": "falcon_h1", "lm_head_multiplier": 0.25}, 0.25),
        ({"logit_scale": 0.0625}, 0.0625),
    ],
)
def test_logit_scales_in_each_familys_convention(tmp_path: Path, changes: dict[str, Any], scale: float) -> None:
    assert facts(tmp_path, **changes).logit_scale == pytest.approx(scale)


def test_defaults_that_a_family_leaves_out(tmp_path: Path) -> None:
    read = facts(tmp_path, drop=("tie_word_embeddings", "rope_theta", "hidden_act"), model_type="gemma2")
    assert read.tie_word_embeddings and read.final_logit_softcap == 30.0 and read.rope_parameters["rope_theta"] == 1e4
    assert facts(tmp_path, final_logit_softcapping=50.0, model_type="gemma2").final_logit_softcap == 50.0
    assert facts(tmp_path, final_logit_softcapping=None, model_type="gemma2").final_logit_softcap is None


def test_experts_and_biases(tmp_path: Path) -> None:
    assert facts(tmp_path, num_local_experts=8).is_moe and facts(tmp_path, n_routed_experts=None).is_moe is False
    assert facts(tmp_path, attention_bias=True, mlp_bias=True).mlp_bias


def test_bad_directories_teach(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for name, words in {"nowhere": "does not exist", "file": "is a file", "empty": "no config.json"}.items():
        with pytest.raises(VerifierError, match=words) as caught:
            read_facts(tmp_path / name)
        assert caught.value.mend
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(VerifierError, match="not valid JSON"):
        read_facts(tmp_path)
    with pytest.raises(VerifierError, match="LayerNorm"):
        facts(tmp_path, model_type="cohere2")
    with pytest.raises(VerifierError, match="hidden_size is None"):
        facts(tmp_path, drop=("hidden_size",), model_type="somebodys_own")


def test_a_complete_config_is_read_without_importing_transformers(tmp_path: Path) -> None:
    facts(tmp_path)
    code = (
        "import sys; from pathlib import Path; from speculators_core.verifier.facts import read_facts;"
        f"read_facts(Path({str(tmp_path)!r})); sys.exit('transformers' in sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[4], check=False).returncode == 0
