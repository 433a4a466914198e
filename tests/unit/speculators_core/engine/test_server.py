"""Paths on which no vLLM is needed: interpreters that sleep, die or print; the rest is in tests/engine."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from speculators_core.engine import server
from speculators_core.engine.runtime import Runtime, RuntimeInfo
from speculators_core.engine.server import ServerSpec, serve
from speculators_core.errors import EngineError, EngineTimeout

INFO = RuntimeInfo(vllm="1", build="b", device="cpu", model_runner="v1", torch="t", transformers="f")
SPEC = ServerSpec(model="m")


def runtime(root: Path, behaviour: str) -> Runtime:
    """An executable that answers the probe and then behaves as told when asked to serve."""
    path = root / "env" / "bin" / "python"
    path.parent.mkdir(parents=True)
    path.write_text(
        f"#!/bin/sh\nif [ \"$1\" = -P ]; then echo 'DRAFTSMITH{INFO.model_dump_json()}'; exit; fi\n{behaviour}\n"
    )
    path.chmod(0o755)
    return Runtime(python=str(path))


def test_a_server_that_never_answers_is_stopped_in_time(tmp_path: Path) -> None:
    started = time.monotonic()
    with (
        pytest.raises(EngineTimeout, match=r"not ready in time(.|\n)*still loading"),
        serve(runtime(tmp_path, "echo still loading; sleep 300"), SPEC, home=tmp_path, startup_timeout_s=1),
    ):
        pass
    assert time.monotonic() - started < 15
    assert list((tmp_path / "engines").iterdir()) == []


def test_a_start_is_given_up_at_once_however_silent_the_server_is(tmp_path: Path) -> None:
    looks: list[float] = []

    def give_up() -> None:
        looks.append(time.monotonic())
        if len(looks) == 5:
            raise KeyboardInterrupt

    with (
        pytest.raises(KeyboardInterrupt),
        serve(runtime(tmp_path, "sleep 300"), SPEC, home=tmp_path, while_starting=give_up),
    ):
        pass
    assert looks[-1] - looks[0] < 5 and list((tmp_path / "engines").iterdir()) == []


def test_a_death_tells_cause_mend_tail_and_log(tmp_path: Path) -> None:
    behaviour = "echo first; echo 'OSError: [Errno 28] No space left on device'; exit 1"
    with pytest.raises(EngineError) as raised, serve(runtime(tmp_path, behaviour), SPEC, home=tmp_path):
        pass
    message = str(raised.value)
    assert "the disk, or /dev/shm, is full" in message
    assert "| first" in message
    assert "log: " in message
    assert raised.value.mend is not None and "make room" in raised.value.mend


def test_an_unknown_death_still_shows_the_log(tmp_path: Path) -> None:
    with (
        pytest.raises(EngineError, match=r"status 7(.|\n)*odd words"),
        serve(runtime(tmp_path, "echo odd words; exit 7"), SPEC, home=tmp_path),
    ):
        pass


def test_a_killed_server_hints_at_memory(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="SIGKILL"), serve(runtime(tmp_path, "kill -9 $$"), SPEC, home=tmp_path):
        pass


def test_a_taken_port_is_given_up_after_a_few_others(tmp_path: Path) -> None:
    behaviour = f"echo x >> {tmp_path}/starts; echo 'OSError: [Errno 98] Address already in use'; exit 1"
    with pytest.raises(EngineError, match="port is in use"), serve(runtime(tmp_path, behaviour), SPEC, home=tmp_path):
        pass
    assert (tmp_path / "starts").read_text().count("x") == server._PORT_ATTEMPTS


def test_an_exception_in_the_block_stops_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_is_ready", lambda http, model_name: True)
    with pytest.raises(KeyError), serve(runtime(tmp_path, "sleep 300"), SPEC, home=tmp_path) as engine:
        assert engine.process is not None and engine.process.poll() is None
        engine.check()
        raise KeyError
    assert engine.process.poll() is not None
    with pytest.raises(EngineError, match="died"):
        engine.check()


def test_a_path_that_is_no_model_is_refused_before_anything_starts(tmp_path: Path) -> None:
    here = runtime(tmp_path, f"touch {tmp_path}/started")
    draft = {"method": "eagle3", "model": str(tmp_path / "no-draft"), "num_speculative_tokens": 3}
    for spec in (ServerSpec(model=str(tmp_path)), ServerSpec(model="org/name", speculative=draft)):
        with pytest.raises(EngineError, match=r"no config\.json") as raised, serve(here, spec, home=tmp_path):
            pass
        assert raised.value.mend
    assert not (tmp_path / "started").exists()


def test_the_tail_of_a_long_log_is_read_without_the_rest(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"x" * 1_000_000 + b"\nthe end\xff\n")
    tail = server.read_tail(log)
    assert len(tail) <= server._LOG_BYTES and "the end" in tail
    assert server.read_tail(tmp_path / "none") == ""


def test_ports_differ_from_a_taken_one() -> None:
    assert 1024 < server._free_port() < 65536
