"""The support table, put together from a runtime's answer and the registry of algorithms."""

from __future__ import annotations

from speculators_core import registry
from speculators_core.engine.capabilities import Capabilities, DraftSupport, VerifierSupport
from speculators_core.lifecycle.support import build_table, hf_model_types, only

PLAIN = VerifierSupport(aux_states=True, latent_attention=False, error=None)
LATENT = VerifierSupport(aux_states=True, latent_attention=True, error=None)
CLOSED = VerifierSupport(aux_states=False, latent_attention=False, error=None)
BROKEN = VerifierSupport(aux_states=None, latent_attention=None, error="ModuleNotFoundError: torchvision")


def capabilities(**drafts: DraftSupport) -> Capabilities:
    known = {name: DraftSupport(refusal=None, asked=True) for name in registry.names()}
    return Capabilities(
        methods=("eagle3", "mtp"),
        drafts={**known, **drafts},
        verifiers={"Plain": PLAIN, "Latent": LATENT, "Closed": CLOSED, "Broken": BROKEN},
    )


def test_every_algorithm_of_the_registry_has_its_line():
    table = build_table(capabilities(), {"Closed": "a", "Plain": "b", "OnlyHF": "c", "Normed": "opt"}, vllm="0.32.0")
    assert tuple(one.algorithm for one in table.algorithms) == registry.names()
    assert table.unloadable == {"Broken": "ModuleNotFoundError: torchvision"}
    line = next(one for one in table.algorithms if one.algorithm == "eagle3")
    assert line.train == {"Plain": "engine", "Closed": "hf", "OnlyHF": "hf"}
    assert line.serve == ("Latent", "Plain"), "served where the states are handed out, captured where they can be"


def test_what_the_model_runner_lacks_is_no_serving():
    lacking = DraftSupport(refusal="candidate heads", asked=True)
    line = next(
        one for one in build_table(capabilities(eagle3=lacking), {}, vllm="0").algorithms if one.algorithm == "eagle3"
    )
    assert line.serve == () and line.refused == "its model runner lacks candidate heads"
    assert line.train == {"Plain": "engine"}, "training does not ask what can be served"


def test_one_architecture_in_words():
    known = {"Closed": "a", "Normed": "cohere2", "Latent": "deepseek_v3"}
    table = build_table(capabilities(), known, vllm="0.32.0")
    assert only(table, "Plain")["eagle3"] == ("yes, captured by vLLM", "yes")
    train, serve = only(table, "Latent")["eagle3"]
    assert train.startswith("yes, captured by a Hugging Face forward: not by vLLM, since its attention is latent (MLA)")
    assert serve == "yes"
    assert only(table, "Closed")["eagle3"][1].startswith("no: it does not hand out")
    assert only(table, "Normed")["eagle3"][0].startswith("no: it ends in a LayerNorm")
    train, serve = only(table, "Broken")["eagle3"]
    assert "transformers does not know it" in train and serve == "no: ModuleNotFoundError: torchvision"


def test_families_say_how_their_verifiers_end():
    by_name = {family.name: family for family in build_table(capabilities(), hf_model_types(), vllm="0").families}
    gemma = by_name["Gemma 1 to 3"]
    assert gemma.ending == "RMSNorm by 1 + w, logits capped by final_logit_softcapping"
    assert {"Gemma2ForCausalLM", "Gemma3ForConditionalGeneration"} <= set(gemma.architectures)
    assert by_name["Granite"].ending == "RMSNorm, logits over logits_scaling"
    assert by_name["models that end in a LayerNorm"].refused and by_name["Llama"].refused is None


def test_transformers_knows_its_language_models():
    found = hf_model_types()
    assert found["LlamaForCausalLM"] == "llama"
    assert found["Qwen2_5_VLForConditionalGeneration"] == "qwen2_5_vl"
