from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from speculators_core.engine import server
from speculators_core.engine.client import GenerationRequest, RequestError
from speculators_core.engine.runtime import Runtime, probe_runtime
from speculators_core.engine.server import Engine, ServerSpec, serve
from speculators_core.errors import EngineError
from speculators_core.processes import reap_orphans
from speculators_core.supervisor import descendants, start_ticks

pytestmark = pytest.mark.engine
ROOT = Path(__file__).resolve().parents[2]
EngineFactory = Callable[[ServerSpec], Engine]

CONVERSATIONS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a river."}],
    [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "  spaces \n and é, 漢字, 🙂"},
    ],
]


@pytest.fixture(scope="session")
def plain(engine: EngineFactory, verifier_dir: Path) -> Engine:
    return engine(ServerSpec(model=str(verifier_dir), max_model_len=1024))


@pytest.fixture(scope="session")
def tokenizer(verifier_dir: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(verifier_dir)


def test_the_runtime_says_which_vllm_it_is(runtime: Runtime, plain: Engine) -> None:
    answered = plain.client()._json("GET", "/version")["version"]
    assert plain.info == probe_runtime(runtime)
    assert plain.info.vllm.split("+")[0] == answered.split("+")[0]


def test_it_knows_the_capital_of_france(plain: Engine, tokenizer) -> None:
    prompt = tokenizer("The capital of France is").input_ids
    with plain.client() as client:
        [answer] = client.generate(
            [GenerationRequest(id="q", prompt_token_ids=tuple(prompt), max_tokens=8)], concurrency=1
        )
    assert "Paris" in answer.text
    assert answer.prompt_token_ids == tuple(prompt)
    assert tokenizer.decode(answer.token_ids, skip_special_tokens=True) == answer.text


def test_results_keep_the_requests_order_and_do_not_depend_on_concurrency(plain: Engine) -> None:
    requests = [
        GenerationRequest(id=f"r{i}", messages=CONVERSATIONS[i % 3], max_tokens=4 + 3 * (i % 5)) for i in range(12)
    ]
    finished: list[str] = []
    with plain.client() as client:
        together = list(client.generate(requests, concurrency=6, on_result=lambda result: finished.append(result.id)))
        alone = list(client.generate(requests[:3], concurrency=1))
    assert [result.id for result in together] == [request.id for request in requests]
    assert sorted(finished) == sorted(request.id for request in requests)
    assert [len(result.token_ids) for result in together] <= [request.max_tokens for request in requests]
    for one, other in zip(together, alone, strict=False):
        assert one.prompt_token_ids == other.prompt_token_ids


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("prompt", [True, False])
def test_it_renders_as_the_tokenizer_does(plain: Engine, tokenizer, conversation, prompt: bool) -> None:
    if not prompt:
        conversation = [*conversation, {"role": "assistant", "content": "Well."}]
    expected = tokenizer.apply_chat_template(conversation, add_generation_prompt=prompt, return_dict=True)["input_ids"]
    with plain.client() as client:
        assert client.render(conversation, add_generation_prompt=prompt) == expected


def test_a_refused_request_concerns_no_other(plain: Engine) -> None:
    requests = [
        GenerationRequest(id="long", prompt_token_ids=(5,) * 2000, max_tokens=4),
        GenerationRequest(id="good", prompt_token_ids=(5, 6, 7), max_tokens=4),
    ]
    refused: list[RequestError] = []
    with plain.client() as client:
        results = list(client.generate(requests, concurrency=2, on_error=refused.append))
        with pytest.raises(RequestError, match="maximum context length"):
            list(client.generate(requests, concurrency=2))
    assert [result.id for result in results] == ["good"]
    assert [(error.request_id, error.status) for error in refused] == [("long", 400)]


def test_a_server_that_does_not_speculate_counts_nothing(plain: Engine) -> None:
    with plain.client() as client:
        assert client.counters().drafts == 0


def test_counters_agree_with_the_requests_own_metrics(engine: EngineFactory, verifier_dir: Path, plain: Engine) -> None:
    speculating = engine(
        ServerSpec(
            model=str(verifier_dir),
            max_model_len=1024,
            per_request_metrics=True,
            speculative={
                "method": "ngram",
                "num_speculative_tokens": 3,
                "prompt_lookup_min": 1,
                "prompt_lookup_max": 3,
            },
        )
    )
    requests = [
        GenerationRequest(
            id=str(i), prompt_token_ids=tuple([10 + i, 300, 400, 500] * 20), max_tokens=24, ignore_eos=True
        )
        for i in range(3)
    ]
    with speculating.client() as client:
        before = client.counters()
        results = list(client.generate(requests, concurrency=1))
        counted = client.counters() - before
    with plain.client() as client:
        [without] = client.generate(requests[:1], concurrency=1)
    assert counted.drafts > 0
    assert counted.accepted == sum(counted.accepted_per_position)
    assert len(counted.accepted_per_position) == 3
    metrics = [result.spec_metrics for result in results]
    assert all(isinstance(metric, dict) for metric in metrics)
    accepted = sum(sum(j * n for j, n in enumerate(metric["acceptance_histogram"])) for metric in metrics)
    assert accepted == counted.accepted
    assert without.spec_metrics is None


def test_a_killed_engine_core_is_noticed_in_mid_run(runtime: Runtime, verifier_dir: Path, tmp_path: Path) -> None:
    with serve(
        runtime, ServerSpec(model=str(verifier_dir), max_model_len=1024, kv_cache_gib=0.5), home=tmp_path
    ) as engine:
        assert engine.process is not None
        [core] = [pid for pid in descendants(engine.process.pid) if "EngineCore" in _title(pid)]
        killed_at: list[float] = []

        def kill() -> None:
            time.sleep(2)
            killed_at.append(time.monotonic())
            os.kill(core, signal.SIGKILL)

        thread = threading.Thread(target=kill)
        thread.start()
        requests = [
            GenerationRequest(id=str(i), prompt_token_ids=(i + 5, 6), max_tokens=1000, ignore_eos=True)
            for i in range(16)
        ]
        with engine.client(timeout_s=600) as client, pytest.raises(EngineError, match="died"):
            list(client.generate(requests, concurrency=8))
        noticed_after = time.monotonic() - killed_at[0]
        thread.join()
    assert noticed_after < 20


def test_a_taken_port_is_replaced(
    runtime: Runtime, verifier_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_port = server._free_port
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        taken = stranger.getsockname()[1]
        offers = iter([taken])
        monkeypatch.setattr(server, "_free_port", lambda: next(offers, None) or free_port())
        with serve(
            runtime, ServerSpec(model=str(verifier_dir), max_model_len=512, kv_cache_gib=0.5), home=tmp_path
        ) as engine:
            assert not engine.base_url.endswith(f":{taken}")
            with engine.client() as client:
                assert client.health()


def test_a_torn_model_says_so(runtime: Runtime, verifier_dir: Path, tmp_path: Path) -> None:
    torn = tmp_path / "torn"
    torn.mkdir()
    for file in verifier_dir.iterdir():
        (torn / file.name).write_bytes(
            file.read_bytes()[:1_000_000] if file.suffix == ".safetensors" else file.read_bytes()
        )
    with (
        pytest.raises(EngineError, match=r"did not start(.|\n)*weights are missing, torn(.|\n)*log: ") as raised,
        serve(runtime, ServerSpec(model=str(torn), max_model_len=512, kv_cache_gib=0.5), home=tmp_path),
    ):
        pass
    assert raised.value.mend is not None and "make or copy the model directory again" in raised.value.mend
    assert list((tmp_path / "engines").iterdir()) == []


def test_kill_minus_nine_of_the_parent_leaves_no_engine(runtime: Runtime, verifier_dir: Path, tmp_path: Path) -> None:
    script = tmp_path / "holder.py"
    script.write_text(
        f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from speculators_core.engine.runtime import Runtime
from speculators_core.engine.server import ServerSpec, serve
spec = ServerSpec(model={str(verifier_dir)!r}, max_model_len=512, kv_cache_gib=0.5)
with serve(Runtime(python={runtime.python!r}), spec, home=Path({str(tmp_path)!r})) as engine:
    print(engine.process.pid, engine.process.group, flush=True)
    time.sleep(600)
"""
    )
    holder = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    supervisor_pid, group = (int(word) for word in holder.stdout.readline().split())
    members = descendants(supervisor_pid)
    assert group in members and len(members) >= 2
    holder.kill()
    holder.wait()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and any(start_ticks(pid) is not None for pid in (supervisor_pid, *members)):
        time.sleep(0.2)
    assert [pid for pid in (supervisor_pid, *members) if start_ticks(pid) is not None] == []
    assert reap_orphans(tmp_path) == []


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""
