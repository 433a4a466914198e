from __future__ import annotations

import pytest

from speculators_core.engine.diagnose import CAUSES, diagnose

STARTUP = """\
Triton is installed, but doesn't include CPU backend. Disabling Triton.
(APIServer pid=8290) INFO 11-30 04:44:03 [api_utils.py:286] non-default args: {'trust_remote_code': False}
(APIServer pid=8290) WARNING 11-30 04:44:14 [cpu.py:224] Triton is not installed. triton-cpu is expected on x86 CPUs.
(EngineCore pid=8339) INFO 11-30 04:44:23 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='m', \
trust_remote_code=False, out of memory, Address already in use
"""
DEATH = """\
(APIServer pid=8290) Traceback (most recent call last):
(APIServer pid=8290)   File "core_client.py", line 1, in launch
(APIServer pid=8290) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
nanobind: leaked 514 functions!
 - leaked function "create_branch"
 - ... skipped remainder
"""


def core(line: str) -> str:
    return f"(EngineCore pid=8339) ERROR 11-30 04:44:31 [core.py:1201] {line}\n"


# lines as torch, transformers and vLLM 0.32.0 print them
RECORDED = {
    "compiler": core("Dumping input data for V1 LLM engine (v0.32.0) with config: model='m', trust_remote_code=True, ")
    + core(
        "torch._inductor.exc.InductorError: InvalidCxxCompiler: No working C++ compiler found in "
        "torch._inductor.config.cpp.cxx: (None, 'g++')"
    ),
    "remote_code": (
        "ValueError: The repository /m contains custom code which must be executed to correctly load the model. "
        "Please pass the argument `trust_remote_code=True` to allow custom code to be run.\n"
    ),
    "torchvision": "RuntimeError: operator torchvision::nms does not exist\n",
    "port": "OSError: [Errno 98] Address already in use\n",
    "kv_cache": core(
        "ValueError: To serve at least one request with the model's max seq len (8192), (0.18 GiB KV cache is needed, "
        "which is larger than the available KV cache memory (0.1 GiB). Based on the available memory, the estimated "
        "maximum model length is 4352."
    ),
    "memory": core("RuntimeError: [enforce fail at alloc_cpu.cpp] . DefaultCPUAllocator: can't allocate memory"),
    "shape": core("    loaded_weight = loaded_weight.narrow(")
    + core("RuntimeError: start (0) + length (256) exceeds dimension size (128)."),
    "weights": core("ValueError: There is no module or parameter named 'layers.0.foo' in LlamaModel."),
    "weights, torn": core(
        "safetensors._safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata, file "
        "not fully covered"
    ),
    "weights, none": core("RuntimeError: Cannot find any model weights with `/models/noweights`"),
    "kv_cache, more than the machine has": core(
        "ValueError: Available memory on node 0 (21.6/23.59 GiB) on kv cache allocation is less than requested memory "
        "for kv (900.0 GiB). Decrease --kv-cache-memory-bytes"
    ),
    "architecture, of transformers": (
        "Error parsing config for /m: The checkpoint you are trying to load has model type `nope` but Transformers "
        "does not recognize this architecture.\n"
    ),
    "architecture": "ValueError: Model architectures ['NopeForCausalLM'] are not supported for now. Supported: ...\n",
    "model_dir": "ValueError: Invalid repository ID or local directory specified: '/models/empty'.\nPlease verify:\n",
    "runner": core("NotImplementedError: Model Runner V1 does not support dspark"),
    "flag": "api_server.py: error: unrecognized arguments: --no-such-flag\n",
    "context": (
        "pydantic_core._pydantic_core.ValidationError: 1 error for ModelConfig\n  Value error, User-specified "
        "max_model_len (999999) is greater than the derived max_model_len (max_position_embeddings=2048)\n"
    ),
    "connector": "ValueError: Unsupported connector type: Nope\n",
    "libnuma": "ImportError: libnuma.so.1: cannot open shared object file: No such file or directory\n",
    "disk": core("OSError: [Errno 28] No space left on device: '/dev/shm/psm_1'"),
    "metadata": "importlib.metadata.PackageNotFoundError: No package metadata was found for vllm\n",
    "transformers": "ImportError: cannot import name 'X' from 'transformers.models' (/env/transformers/__init__.py)\n",
    "no_vllm": "ModuleNotFoundError: No module named 'vllm'\n",
    "import": "ModuleNotFoundError: No module named 'msgspec'\n",
}


@pytest.mark.parametrize("kind", RECORDED)
def test_a_recorded_death_is_recognised_between_chatter_and_consequences(kind: str) -> None:
    found = diagnose(STARTUP + RECORDED[kind] + DEATH)
    assert found.kind == kind.split(",")[0]
    assert found.mend
    assert found.error and "pid=" not in found.error


def test_chatter_alone_is_no_cause() -> None:
    found = diagnose(STARTUP + DEATH)
    assert found.kind == "unknown"


def test_an_unknown_error_is_quoted() -> None:
    found = diagnose(STARTUP + core("FunnyError: never seen before") + DEATH)
    assert (found.kind, found.error) == ("unknown", "FunnyError: never seen before")


def test_the_tail_shows_the_end_without_prefixes_and_farewells() -> None:
    tail = diagnose(STARTUP + core("FunnyError: x") + DEATH, tail_lines=3).tail.splitlines()
    assert tail[-1].startswith("RuntimeError: Engine core initialization failed")
    assert len(tail) == 3


def test_an_empty_log_is_no_trouble() -> None:
    assert diagnose("").kind == "unknown"


def test_kinds_are_distinct_and_each_has_words() -> None:
    assert len({cause.kind for cause in CAUSES}) == len(CAUSES)
    assert all(cause.what and cause.mend for cause in CAUSES)
