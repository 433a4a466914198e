"""Which verifiers each algorithm accepts, for training and for serving, on the runtime at hand.

Nothing here is a list that somebody keeps: algorithms come from the registry, verifiers and kinds of draft from the
runtime's own registries, and what a Hugging Face forward can capture from the installed transformers. What only a
verifier's directory can tell (its shape, a native head) is preflight's to check.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, ValidationError

from speculators_core import registry
from speculators_core.engine.capabilities import Capabilities, VerifierSupport
from speculators_core.types import Algorithm, StrictModel

Road = Literal["engine", "hf"]


class AlgorithmSupport(StrictModel):
    """One algorithm against the architectures of one runtime."""

    algorithm: str
    train: dict[str, Road] = Field(description="architecture → how its hidden states are captured")
    serve: tuple[str, ...] = Field(description="architectures that the runtime serves with such a draft")
    refused: str | None = Field(description="why the runtime serves no such draft at all; None: it does")
    note: str = ""


class SupportTable(StrictModel):
    """Every algorithm, and the architectures that the runtime could not even load, with its reason."""

    vllm: str
    algorithms: tuple[AlgorithmSupport, ...]
    unloadable: dict[str, str]


def build_table(capabilities: Capabilities, hf_architectures: frozenset[str], *, vllm: str) -> SupportTable:
    """Put together what code and runtime say.

    Args:
        hf_architectures: causal language models of the installed transformers.
    """
    return SupportTable(
        vllm=vllm,
        algorithms=tuple(_support(registry.resolve(name), capabilities, hf_architectures) for name in registry.names()),
        unloadable={name: v.error for name, v in capabilities.verifiers.items() if v.error is not None},
    )


def hf_causal_models() -> frozenset[str]:
    """Architectures that the installed transformers runs as causal language models."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return frozenset(str(name) for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())


def _support(algorithm: Algorithm, capabilities: Capabilities, hf: frozenset[str]) -> AlgorithmSupport:
    verifiers = capabilities.verifiers
    native = algorithm.stitch is not None
    train: dict[str, Road] = {}
    for name in sorted(verifiers.keys() | hf):
        if name in verifiers and _captured(verifiers[name]):
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


def _captured(verifier: VerifierSupport) -> bool:
    return bool(verifier.aux_states) and not verifier.latent_attention


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
    found = {}
    for one in table.algorithms:
        road = one.train.get(architecture)
        train = "no" if road is None else f"yes, captured by {'vLLM' if road == 'engine' else 'a Hugging Face forward'}"
        if one.refused is not None:
            serve = f"no: {one.refused}"
        elif architecture in table.unloadable:
            serve = f"no: {table.unloadable[architecture]}"
        else:
            serve = "yes" if architecture in one.serve else "no: it does not hand out its layers' states"
        found[one.algorithm] = train + (f" ({one.note})" if one.note else ""), serve
    return found
