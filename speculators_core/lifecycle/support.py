"""Which verifiers each algorithm accepts, for training and for serving, on the runtime at hand.

Nothing here is a list that somebody keeps: algorithms come from the registry, verifiers and kinds of draft from the
runtime's own registries, what a Hugging Face forward can capture from the installed transformers, and how a verifier
ends from the table of families. What only a verifier's directory can tell (its shape, a native head) is preflight's to
check.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, ValidationError

from speculators_core import registry
from speculators_core.engine.capabilities import Capabilities, VerifierSupport
from speculators_core.types import Algorithm, StrictModel
from speculators_core.verifier.families import FAMILIES, Family, family_of

Road = Literal["engine", "hf"]


class AlgorithmSupport(StrictModel):
    """One algorithm against the architectures of one runtime."""

    algorithm: str
    train: dict[str, Road] = Field(description="architecture → how its hidden states are captured")
    serve: tuple[str, ...] = Field(description="architectures that the runtime serves with such a draft")
    refused: str | None = Field(description="why the runtime serves no such draft at all; None: it does")
    note: str = ""


class FamilySupport(StrictModel):
    """A family whose facts, final norm, head and logits are known: what its verifiers end in."""

    name: str
    architectures: tuple[str, ...]
    ending: str
    refused: str | None = Field(description="why no draft is trained for it; None: drafts are")


class SupportTable(StrictModel):
    """Every algorithm and every known family, and what stands in an architecture's way."""

    vllm: str
    algorithms: tuple[AlgorithmSupport, ...]
    families: tuple[FamilySupport, ...]
    unloadable: dict[str, str] = Field(description="architecture → why the runtime could not even load its class")
    uncaptured: dict[str, str] = Field(description="architecture → why vLLM captures no hidden states of it")


def build_table(capabilities: Capabilities, model_types: Mapping[str, str], *, vllm: str) -> SupportTable:
    """Put together what code and runtime say.

    Args:
        model_types: of each architecture that the installed transformers runs, see `hf_model_types`.
    """
    verifiers = capabilities.verifiers
    return SupportTable(
        vllm=vllm,
        algorithms=tuple(_support(registry.resolve(name), capabilities, model_types) for name in registry.names()),
        families=tuple(_family(family, model_types) for family in FAMILIES),
        unloadable={name: v.error for name, v in verifiers.items() if v.error is not None},
        uncaptured={name: reason for name, v in verifiers.items() if (reason := _uncaptured(v)) is not None},
    )


def hf_model_types() -> dict[str, str]:
    """Architecture → model type, of the language models that the installed transformers runs, multimodal ones too."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    both = (*MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items(), *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items())
    return {str(architecture): str(model_type) for model_type, architecture in both}


def _family(family: Family, model_types: Mapping[str, str]) -> FamilySupport:
    return FamilySupport(
        name=family.name,
        architectures=tuple(sorted(name for name, kind in model_types.items() if kind in family.model_types)),
        ending=family.describe(),
        refused=family.refused or None,
    )


def _support(algorithm: Algorithm, capabilities: Capabilities, hf: Mapping[str, str]) -> AlgorithmSupport:
    verifiers = capabilities.verifiers
    native = algorithm.stitch is not None
    train: dict[str, Road] = {}
    for name in sorted(verifiers.keys() | hf.keys()):
        family = family_of(hf.get(name, ""))
        if family is not None and family.refused:
            continue
        if name in verifiers and _uncaptured(verifiers[name]) is None:
            train[name] = "engine"
        elif name in hf:
            train[name] = "hf"
    refused = _refusal(algorithm.name, native, capabilities)
    needs_states = not native and _reads_layers(algorithm)
    serve = [name for name, v in verifiers.items() if v.error is None and (v.aux_states or not needs_states)]
    return AlgorithmSupport(
        algorithm=algorithm.name,
        train=train,
        serve=() if refused is not None else tuple(sorted(serve)),
        refused=refused,
        note="only verifiers that carry a head of their own; preflight tells which" if native else "",
    )


def _uncaptured(verifier: VerifierSupport) -> str | None:
    """Why vLLM cannot capture it; None: it can."""
    if verifier.error is not None:
        return verifier.error
    if verifier.latent_attention:
        return "its attention is latent (MLA), whose cache has no room for hidden states"
    return None if verifier.aux_states else "it does not hand out its layers' states"


def _refusal(name: str, native: bool, capabilities: Capabilities) -> str | None:
    if native:
        return None if name in capabilities.methods else f"vLLM has no method {name}"
    if name not in capabilities.drafts:
        return "vLLM does not know this kind of draft"
    found = capabilities.drafts[name]
    if found.refusal is None:
        return None
    return f"its model runner lacks {found.refusal}" if found.asked else f"it could not be asked: {found.refusal}"


def _reads_layers(algorithm: Algorithm) -> bool:
    """Whether the algorithm reads hidden states of inner layers, by its default configuration."""
    try:
        config = algorithm.config.model_validate({"kind": algorithm.name})
    except ValidationError:
        return True  # a knob without a default: take the stricter side
    return bool(algorithm.aux_layers(config, 32))


def only(table: SupportTable, architecture: str) -> Mapping[str, tuple[str, str]]:
    """Algorithm → (training, serving) in words, for one architecture."""
    family = next((family for family in table.families if architecture in family.architectures), None)
    found = {}
    for one in table.algorithms:
        train = _train_in_words(table, one.train.get(architecture), architecture, family)
        if one.refused is not None:
            serve = f"no: {one.refused}"
        elif architecture in table.unloadable:
            serve = f"no: {table.unloadable[architecture]}"
        else:
            serve = "yes" if architecture in one.serve else "no: it does not hand out its layers' states"
        found[one.algorithm] = train + (f" ({one.note})" if one.note else ""), serve
    return found


def _train_in_words(table: SupportTable, road: Road | None, architecture: str, family: FamilySupport | None) -> str:
    if family is not None and family.refused is not None:
        return f"no: {family.refused}"
    reason = table.uncaptured.get(architecture)
    if road is None:
        return "no" if reason is None else f"no: vLLM cannot capture it ({reason}), and transformers does not know it"
    if road == "engine":
        return "yes, captured by vLLM"
    return "yes, captured by a Hugging Face forward" + ("" if reason is None else f": not by vLLM, since {reason}")
