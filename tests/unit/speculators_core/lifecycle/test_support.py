"""The support table, put together from a runtime's answer and the registry of algorithms."""

from __future__ import annotations

from speculators_core import registry
from speculators_core.engine.capabilities import Capabilities, DraftSupport, VerifierSupport
from speculators_core.lifecycle.support import build_table, hf_causal_models, only

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
    table = build_table(capabilities(), frozenset({"Closed", "Plain", "OnlyHF"}), vllm="0.32.0")
    assert tuple(one.algorithm for one in table.algorithms) == registry.names()
    assert table.unloadable == {"Broken": "ModuleNotFoundError: torchvision"}
    line = next(one for one in table.algorithms if one.algorithm == "eagle3")
    assert line.train == {"Plain": "engine", "Closed": "hf", "OnlyHF": "hf"}
    assert line.serve == ("Latent", "Plain"), "served where the states are handed out, captured where they can be"


def test_what_the_model_runner_lacks_is_no_serving():
    lacking = DraftSupport(refusal="candidate heads", asked=True)
    line = next(
        one
        for one in build_table(capabilities(eagle3=lacking), frozenset(), vllm="0").algorithms
        if one.algorithm == "eagle3"
    )
    assert line.serve == () and line.refused == "its model runner lacks candidate heads"
    assert line.train == {"Plain": "engine"}, "training does not ask what can be served"


def test_one_architecture_in_words():
    table = build_table(capabilities(), frozenset({"Closed"}), vllm="0.32.0")
    assert only(table, "Plain")["eagle3"] == ("yes, captured by vLLM", "yes")
    assert only(table, "Latent")["eagle3"] == ("no", "yes")
    assert only(table, "Closed")["eagle3"][1].startswith("no: it does not hand out")
    assert only(table, "Broken")["eagle3"] == ("no", "no: ModuleNotFoundError: torchvision")


def test_transformers_knows_its_causal_models():
    assert {"LlamaForCausalLM", "Qwen3ForCausalLM"} <= hf_causal_models()
