"""What a runtime can serve: its verifier architectures and its ways to speculate, asked of vLLM's own registries."""

from __future__ import annotations

import logging
from pathlib import Path

from pydantic import Field, ValidationError

from speculators_core.engine.runtime import Runtime, ask_interpreter, probe_runtime
from speculators_core.errors import EngineError
from speculators_core.store.files import remember_text
from speculators_core.types import StrictModel

log = logging.getLogger(__name__)

_TIMEOUT_S = 900
"""Half a minute of processor time, on machines that do other things besides."""

# Runs inside the runtime. Every architecture's class is loaded, since only the class knows its interfaces.
_PROBE = """
import json
from types import MethodType, SimpleNamespace
from typing import get_args
from vllm.config import VllmConfig
from vllm.config.speculative import SpeculativeMethod
from vllm.model_executor.models import registry
from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.transformers_utils.configs.speculators.algos import SUPPORTED_SPECULATORS_TYPES
from vllm.transformers_utils.configs.speculators.base import SpeculatorsConfig

def flat(literal):
    return [name for part in get_args(literal) for name in (flat(part) if get_args(part) else [part])]

def look(name):
    try:
        cls = registry.ModelRegistry.models[name].load_model_cls()
    except Exception as error:
        return {"aux_states": None, "latent_attention": None, "error": f"{type(error).__name__}: {error}"[:200]}
    names = {base.__module__ for base in cls.__mro__ if base.__module__.startswith("vllm.model_executor.models")}
    import sys
    latent = any("MultiHeadLatentAttentionWrapper" in vars(sys.modules[n]) for n in names)
    return {"aux_states": bool(supports_eagle3(cls)), "latent_attention": latent, "error": None}

class Nothing:  # a setting that nobody made: false, zero, empty, whatever is asked of it
    def __getattr__(self, name):
        return self
    def __call__(self, *a, **k):
        return self
    def __bool__(self):
        return False
    def __iter__(self):
        return iter(())
    def __gt__(self, other):
        return False
    __lt__ = __ge__ = __le__ = __gt__

class Config(Nothing):
    def __getattr__(self, name):
        found = getattr(VllmConfig, name, None)
        return MethodType(found, self) if callable(found) and name.startswith("_") else Nothing()

class Made(SimpleNamespace):  # what was set is there, all else is nothing
    def __getattr__(self, name):
        return Nothing()

def refusal(kind, second):
    content = {
        "speculators_model_type": kind, "mask_token_id": 0, "block_size": 4,
        "aux_hidden_state_layer_ids": [1, 2, 3], "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "speculators_config": {"proposal_methods": [{"speculative_tokens": 3}], "verifier": {"name_or_path": "x"}},
        "transformer_layer_config": {"model_type": "llama"},
    }
    method = SpeculatorsConfig.build_vllm_speculative_config(dict(content))["method"]
    draft = SpeculatorsConfig.extract_transformers_pre_trained_config(dict(content))
    config = Config()
    check = getattr(VllmConfig, f"_get_v{2 if second else 1}_model_runner_unsupported_features")
    before = set(check(config))
    draft_config = SimpleNamespace(architectures=draft["architectures"], hf_config=SimpleNamespace(**draft))
    config.speculative_config = Made(method=method, draft_model_config=draft_config)
    return ", ".join(sorted(set(check(config)) - before)) or None

def drafts(second):
    found = {}
    for kind in SUPPORTED_SPECULATORS_TYPES:
        try:
            found[kind] = {"refusal": refusal(kind, second), "asked": True}
        except Exception as error:
            found[kind] = {"refusal": f"{type(error).__name__}: {error}"[:200], "asked": False}
    return found

import os
print("DRAFTSMITH" + json.dumps({
    "methods": sorted(set(flat(SpeculativeMethod))),
    "drafts": drafts(os.environ.get("DRAFTSMITH_MODEL_RUNNER") == "v2"),
    "verifiers": {name: look(name) for name in sorted(registry._TEXT_GENERATION_MODELS)},
}))
"""


class VerifierSupport(StrictModel):
    """One architecture of the runtime; None where its class cannot even be loaded there (`error` says why)."""

    aux_states: bool | None = Field(description="hands out hidden states of its layers: needed to capture and to draft")
    latent_attention: bool | None = Field(
        description="has multi-head latent attention, whose states vLLM cannot capture"
    )
    error: str | None


class DraftSupport(StrictModel):
    """A kind of draft that the runtime knows."""

    refusal: str | None = Field(description="what its model runner lacks for it; None: nothing")
    asked: bool = Field(description="False: the runtime could not be asked, and `refusal` says why")


class Capabilities(StrictModel):
    """What a runtime says that it can do."""

    methods: tuple[str, ...] = Field(description="values of --speculative-config's `method`")
    drafts: dict[str, DraftSupport] = Field(description="kind of draft in the speculators format → support")
    verifiers: dict[str, VerifierSupport] = Field(description="architecture → support")


def probe_capabilities(runtime: Runtime, *, home: Path) -> Capabilities:
    """Ask a runtime what it can serve. The first answer takes ten seconds and more; it is kept by `runtime.key`.

    Raises:
        EngineError: there is no such interpreter, no vLLM in it, one whose registries are built otherwise, or the
            runtime is a server, which does not tell.
    """
    if runtime.python is None:
        raise EngineError("a server does not say what it could serve", mend="name the interpreter that runs it")
    info = probe_runtime(runtime, home=home)
    kept = home / "runtimes" / f"{info.key[:32]}.capabilities.json"
    if kept.is_file():
        try:
            return Capabilities.model_validate_json(kept.read_text())
        except ValidationError:
            log.info("the kept answer of vLLM %s is of another form; asking again", info.vllm)
    log.info("vLLM %s loads each of its model classes, to say what it can serve: a minute, once", info.vllm)
    python = Path(runtime.python).expanduser().absolute()
    variables = {"DRAFTSMITH_MODEL_RUNNER": info.model_runner}
    answer = ask_interpreter(python, _PROBE, variables=variables, timeout_s=_TIMEOUT_S)
    found = Capabilities.model_validate_json(answer)
    remember_text(kept, found.model_dump_json(indent=1) + "\n")
    return found
