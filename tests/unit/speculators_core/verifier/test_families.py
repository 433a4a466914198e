"""Each family: facts read, head and final norm taken from the saved files, and logits equal to the library's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from speculators_core import registry
from speculators_core.algorithms._blocks.borrowed import borrow
from speculators_core.errors import ConfigError, VerifierError
from speculators_core.states.gates import check_source
from speculators_core.states.hf import HiddenStateForward
from speculators_core.verifier.facts import read_facts
from speculators_core.verifier.families import FAMILIES, family_of

from .tiny_families import FAMILIES_HERE, SIZES, Tiny, some_tokens

UNSEEN = {
    "nanochat": "its final norm has no weight, and without one no head is read",
    "others by 1 + w": "of the same ending as others",
    "other latent attention": "of the same ending as others",
    **{family.name: "refused" for family in FAMILIES if family.refused},
}


@pytest.mark.parametrize("tiny", FAMILIES_HERE, ids=lambda tiny: tiny.name or tiny.model_type)
def test_our_ending_gives_the_librarys_logits(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny.build(tmp_path)
    facts = read_facts(tmp_path)
    expected = {"norm_convention": "plain", "final_logit_softcap": None, "logit_scale": 1.0, "latent_attention": False}
    expected |= {key: SIZES[key] for key in ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads")}
    expected |= {key: value for key, value in tiny.facts.items() if key != "partial"}
    assert {key: getattr(facts, key) for key in expected} == expected
    assert facts.rope_parameters.get("partial_rotary_factor", 1.0) == tiny.facts.get("partial", 1.0)
    assert not any(key.startswith("mrope") for key in facts.rope_parameters), "text positions turn as plain ones do"

    tokens = some_tokens()
    with torch.no_grad():
        wanted = model(input_ids=tokens[None]).logits[0]
    states = HiddenStateForward(tmp_path, (0, 1, facts.num_hidden_layers), "float32")(tokens)
    teacher = borrow(tmp_path, facts, None).teacher
    ours = teacher.logits(states[:, -1], torch.float32)
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))
    if teacher.softcap is not None:
        teacher.softcap = None
        assert not torch.allclose(teacher.logits(states[:, -1], torch.float32), wanted, atol=0.1), "the cap matters"

    draft = registry.resolve("eagle3")
    model = draft.build(draft.config.model_validate({"aux_layers": (0, 1)}), tmp_path, None, 0)
    assert bool(torch.isfinite(model.rotary(tokens)[0]).all()), "a draft of its shape turns whole heads"


def test_every_family_is_tested_or_says_why_not() -> None:
    tested = {family_of(tiny.model_type) for tiny in FAMILIES_HERE}
    assert {family.name for family in FAMILIES if family not in tested} == set(UNSEEN)
    types = [model_type for family in FAMILIES for model_type in family.model_types]
    assert len(types) == len(set(types)), "a model type belongs to one family"


@pytest.mark.parametrize("model_type", [family.model_types[-1] for family in FAMILIES if family.refused])
def test_what_cannot_be_drafted_for_is_refused_with_the_reason(model_type: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    family = family_of(model_type)
    assert family is not None
    with pytest.raises(VerifierError, match=family.refused) as caught:
        read_facts(tmp_path)
    assert caught.value.mend


def test_the_engine_is_not_asked_to_capture_latent_attention(tmp_path: Path) -> None:
    tiny = next(tiny for tiny in FAMILIES_HERE if tiny.model_type == "deepseek_v3")
    tiny.build(tmp_path)
    facts = read_facts(tmp_path)
    check_source("hf", facts)
    with pytest.raises(ConfigError, match="latent attention") as caught:
        check_source("engine", facts)
    assert caught.value.mend is not None and "hf" in caught.value.mend


def test_a_quantised_head_is_refused_and_quantised_layers_are_not(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    Tiny("llama").build(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    packed = {**tensors, name: tensors[name].to(torch.float8_e4m3fn), f"{name}_scale": torch.ones(1)}
    save_file(packed, tmp_path / "model.safetensors")
    borrow(tmp_path, read_facts(tmp_path), None)
    packed["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)
    save_file(packed, tmp_path / "model.safetensors")
    with pytest.raises(VerifierError, match="quantised tensor without its scale"):
        borrow(tmp_path, read_facts(tmp_path), None)
