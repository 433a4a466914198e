"""The supervisor behind a real HAProxy, over engines that only count: rolls, falls, errors, an absent registry."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NoReturn, cast

import httpx
import pytest
import torch
from safetensors.torch import save_file

from speculators_core import supervisor
from speculators_core.engine.client import EngineClient
from speculators_core.engine.runtime import Runtime, RuntimeInfo
from speculators_core.engine.server import Engine
from speculators_core.errors import ConfigError, EngineError, Interrupted, RegistryError, VerifierError
from speculators_core.lifecycle.drift import read_windows
from speculators_core.processes import SupervisedProcess, supervise
from speculators_core.serving.config import ServeConfig, WatchConfig
from speculators_core.serving.economy import Advice
from speculators_core.serving.events import ServeEvent
from speculators_core.serving.fleet import Fleet, Refused
from speculators_core.serving.proxy import Proxy
from speculators_core.serving.supervisor import Supervisor
from speculators_core.serving.version import Replica, ServedVersion
from speculators_core.verifier.fingerprint import fingerprint
from tasks.adapters.prefect_server import free_port
from tests.client_load import steady_load
from tests.environment import child_environment
from tests.haproxy import needs_haproxy

pytestmark = needs_haproxy
INFO = RuntimeInfo(vllm="0", build="b", device="cpu", model_runner="v1", torch="0", transformers="0")
AWAY = RegistryError("MLflow does not answer")
DISK_FULL = OSError(errno.ENOSPC, "No space left on device")
WATCH = WatchConfig(window_s=3600, min_drafts=20, min_requests=10, note_every_s=0.01)


@dataclass
class Plan:
    """An engine of a version: AL of its drafts (K = 3), share of requests that fail, faults at the start."""

    al: float = 2.0
    failing: float = 0.0
    refused: str = ""
    fault: str = ""


@dataclass
class CountingEngine:
    """A server that answers chat requests with its version and counts as vLLM does."""

    version: str
    plan: Plan
    fleet: CountingFleet
    decode_s: float
    prompt_tokens: int = 0
    requests: int = 0
    status: int | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def poll(self) -> int | None:
        return self.status

    def metrics(self) -> str:
        """Ten drafts a request; accepted from their front, at a rate that gives the AL."""
        drafts, share = 10 * self.requests, (self.plan.al - 1) / 3
        counts = {
            "vllm:spec_decode_num_drafts_total": drafts,
            "vllm:spec_decode_num_accepted_tokens_total": 3 * share * drafts,
            "vllm:request_generation_tokens_count": self.requests,
            "vllm:request_generation_tokens_sum": 10 * self.requests,
            "vllm:request_decode_time_seconds_sum": self.decode_s * self.requests,
            "vllm:prompt_tokens_total": self.prompt_tokens,
            "vllm:generation_tokens_total": 10 * self.requests,
        }
        lines = [f'{name}{{engine="0"}} {value}' for name, value in counts.items()]
        lines += [
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{n}"}} {share * drafts}' for n in range(3)
        ]
        return "\n".join(lines)

    @contextmanager
    def running(self) -> Iterator[str]:
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: object) -> None: ...

            def do_GET(self) -> None:
                self.answer(200, engine.metrics() if self.path == "/metrics" else "{}")

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with engine.lock:
                    engine.requests += 1
                    engine.prompt_tokens += engine.fleet.prompt_tokens
                    fails = engine.requests * engine.plan.failing % 1 < engine.plan.failing
                if body.get("stream"):
                    self.stream(int(body["stream"]))
                else:
                    self.answer(500 if fails else 200, engine.version)

            def answer(self, status: int, text: str) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def stream(self, chunks: int) -> None:
                self.send_response(200)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                for _ in range(chunks):
                    self.wfile.write(f"1\r\n{engine.version}\r\n".encode())
                    self.wfile.flush()
                    time.sleep(0.1)
                self.wfile.write(b"0\r\n\r\n")

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
            yield f"http://127.0.0.1:{server.server_port}"
            server.shutdown()
            self.status = 0


class CountingFleet(Fleet):
    """A fleet whose engines only count; the proxy is real."""

    def __init__(self, config: ServeConfig, home: Path, plans: dict[str, Plan]) -> None:
        super().__init__(config, Runtime(python="python"), home, home / "serving" / "chat")
        self.config = config
        self.plans = plans
        self.prompt_tokens, self.alone_s = 10, 0.1  # of a request; seconds of decoding without drafts
        self.engines: list[CountingEngine] = []

    def start(self, version: ServedVersion, *, speculate: bool = True) -> Replica:
        plan = self.plans[version.version]
        if plan.fault:
            raise EngineError(plan.fault)
        if plan.refused:
            raise Refused(plan.refused)
        with ExitStack() as stack:
            engine = CountingEngine(version.version, plan, self, 0.1 if speculate else self.alone_s)
            self.engines.append(engine)
            url = stack.enter_context(engine.running())
            served = Engine(url, "chat", INFO, Path("log"), cast(SupervisedProcess, engine))
            return Replica(version, speculate, served, stack.enter_context(EngineClient(url)), stack.pop_all())

    def running(self) -> list[str]:
        return [engine.version for engine in self.engines if engine.poll() is None]


class Registry:
    """Implements `VersionSource`. Each version has a verifier of its own; all are the same, and none was ever trained.

    `trouble` is what every answer raises.
    """

    def __init__(self, home: Path) -> None:
        self.champion = "1"
        self.home = home
        self.trouble: Exception | None = None
        self.taken_back: list[tuple[str, str]] = []
        self.forbidden: set[str] = set()

    def wanted(self) -> str:
        self._answer()
        return self.champion

    def admit(self, version: str) -> ServedVersion:
        self._answer()
        if version in self.forbidden:
            raise RegistryError(f"version {version} may not serve")
        return ServedVersion(
            model="chat",
            version=version,
            verifier=self.verifier(version),
            verifier_fingerprint=fingerprint(self.verifier(version), home=None).digest,
            draft=Path("nowhere"),
            draft_files={},
            al=2.0,
        )

    def verifier(self, version: str) -> Path:
        directory = self.home / "verifiers" / version
        if not directory.exists():
            directory.mkdir(parents=True)
            (directory / "config.json").write_text("{}")
            save_file({"weight": torch.ones(2)}, directory / "model.safetensors")
        return directory

    def take_back(self, version: str, why: str) -> None:
        self._answer()
        self.taken_back.append((version, why))
        self.champion = "1"

    def _answer(self) -> None:
        if self.trouble is not None:
            raise self.trouble


@dataclass
class World:
    fleet: CountingFleet
    registry: Registry
    supervisor: Supervisor
    told: list[ServeEvent]

    def kinds(self) -> list[str]:
        return [event.event for event in self.told]

    def ask(self, http: httpx.Client | None = None) -> str:
        """The version that answers."""
        answer = (http or httpx).post(
            f"{self.fleet.address if http is None else ''}/v1/chat/completions", json={"stream": 0}
        )
        assert answer.status_code == 200, answer.status_code
        return answer.text

    def traffic(self, requests: int) -> set[str]:
        with httpx.Client(base_url=self.fleet.address, trust_env=False) as http:
            return {http.post("/v1/chat/completions", json={"stream": 0}).text for _ in range(requests)}

    def promote(self, version: str) -> None:
        self.registry.champion = version
        self.supervisor.look()


def counting_fleet(home: Path, plans: dict[str, Plan] | None = None, **settings: Any) -> CountingFleet:
    """Three good versions, but for `plans`; `settings`: keys of `serve` laid over those of tests."""
    values = {"port": free_port(), "engines": "beside", "watch": WATCH, "drain_timeout_s": 30, **settings}
    return CountingFleet(
        ServeConfig.model_validate(values), home, {"1": Plan(), "2": Plan(), "3": Plan(), **(plans or {})}
    )


def serve_until_stopped(home: Path) -> None:
    """What `draftsmith serve` does, as a program: prints the address, ends as the command would."""
    fleet = counting_fleet(home)
    print(fleet.address, flush=True)
    try:
        Supervisor("chat", Registry(home), fleet.config, fleet, home, lambda event: None).run()
    except Interrupted:
        sys.exit(130)


@contextmanager
def serving(home: Path, *, plans: dict[str, Plan] | None = None, **settings: Any) -> Iterator[World]:
    fleet = counting_fleet(home, plans, **settings)
    registry, told = Registry(home), list[ServeEvent]()
    supervisor = Supervisor("chat", registry, fleet.config, fleet, home, told.append)
    try:
        supervisor.begin()
        yield World(fleet, registry, supervisor, told)
    finally:
        fleet.stop()


def test_of_a_thousand_requests_none_fails_while_versions_roll(tmp_path: Path) -> None:
    with serving(tmp_path) as world:
        assert world.ask() == "1"
        with steady_load(world.fleet.address, world.ask, clients=4) as load:
            for version in ("2", "3", "1", "2"):
                load.await_answers(200, timeout_s=60)
                world.promote(version)
            load.await_answers(200, timeout_s=60)
        assert load.failures == [] and len(load.answers) >= 1000
        assert set(load.answers) == {"1", "2", "3"} and world.ask() == "2"
        assert world.kinds()[:4] == ["starting", "ready", "rolling", "rolled"]
        world.supervisor.look()
        assert len(world.fleet.running()) == 2, "the displaced one stands by, all others are gone"


def test_a_stream_that_began_before_a_roll_ends_whole(tmp_path: Path) -> None:
    with serving(tmp_path) as world, httpx.Client(base_url=world.fleet.address, trust_env=False) as http:
        with http.stream("POST", "/v1/chat/completions", json={"stream": 30}) as reply:
            pieces = reply.iter_bytes()
            received = next(pieces)
            world.promote("2")
            assert world.ask() == "2"
            world.promote("3")  # version 1 must end now, but for its stream
            received += b"".join(pieces)
        assert received == b"1" * 30
        world.supervisor.look()
        assert "1" not in world.fleet.running()


def test_a_fall_of_acceptance_brings_the_displaced_engine_back_in_moments(tmp_path: Path) -> None:
    with serving(tmp_path, plans={"2": Plan(al=1.1)}) as world:
        world.traffic(20)
        world.supervisor.look()
        world.promote("2")
        assert world.traffic(20) == {"2"}
        world.supervisor.look()
        assert world.traffic(5) == {"1"}
        assert world.fleet.engines[0].poll() is None and len(world.fleet.engines) == 2, "no engine was started for it"
        [back] = [event for event in world.told if event.event == "rolled_back"]
        assert back.version == "1" and "version 2: served acceptance length 1.100" in back.reason
        assert back.seconds is not None and back.seconds < 5
        assert [version for version, _ in world.registry.taken_back] == ["2"]
        world.supervisor.look()
        assert world.fleet.running() == ["1"] and "rolling" not in world.kinds()[world.kinds().index("rolled_back") :]


@pytest.mark.parametrize("engines", ["beside", "in-place"])
def test_what_a_version_served_while_its_successor_started_is_held_against_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engines: str
) -> None:
    """Promoted right after a roll: no look has counted the displaced one yet; the registered 2.0 would pass."""
    with serving(tmp_path, plans={"1": Plan(al=3.9)}, engines=engines) as world:
        if engines == "beside":
            start = world.fleet.start
            monkeypatch.setattr(
                world.fleet, "start", lambda version, **how: (world.traffic(20), start(version, **how))[1]
            )
        else:
            vacate = world.fleet.vacate
            monkeypatch.setattr(world.fleet, "vacate", lambda: (world.traffic(20), vacate())[1])
        world.promote("2")
        monkeypatch.undo()
        world.traffic(20)
        world.supervisor.look()
        [back] = [event for event in world.told if event.event == "rolled_back"]
        assert "acceptance length 2.000" in back.reason and "3.900 before" in back.reason


def test_failing_requests_and_a_dead_engine_bring_it_back_too(tmp_path: Path) -> None:
    with serving(tmp_path, plans={"2": Plan(failing=0.5)}) as world:
        world.promote("2")
        world.traffic(20)
        world.supervisor.look()
        assert "10 of 20 requests failed" in world.told[-1].reason and world.ask() == "1"
        world.promote("3")
        world.fleet.engines[-1].status = 137
        world.supervisor.look()
        assert world.kinds()[-2:] == ["engine_died", "rolled_back"] and world.ask() == "1"
        assert [version for version, _ in world.registry.taken_back] == ["2", "3"]


def test_the_champion_s_dead_engine_is_started_again(tmp_path: Path) -> None:
    with serving(tmp_path) as world:
        world.registry.trouble = AWAY
        world.fleet.engines[0].status = 1
        world.supervisor.look()
        assert world.kinds()[-3:] == ["engine_died", "restarted", "registry_away"] and world.ask() == "1"
        assert world.registry.taken_back == []
        world.fleet.plans["1"] = Plan(fault="out of memory")
        world.fleet.engines[-1].status = 137
        with pytest.raises(EngineError, match="out of memory"):
            world.supervisor.look()


def test_traffic_that_speaks_against_drafts_is_tried_without_them(tmp_path: Path) -> None:
    rules = {"mode": "on", "sustained_s": 0.05, "prefill_heavy": 5}
    with serving(tmp_path, auto_disable=rules) as world:

        def span() -> str:
            world.supervisor.look()
            world.traffic(20)
            time.sleep(0.06)
            world.supervisor.look()
            return world.kinds()[-1]

        assert span() == "ready", "usual traffic"
        world.fleet.prompt_tokens, world.fleet.alone_s = 1000, 0.05
        assert span() == "speculation_off" and len(world.fleet.running()) == 2
        assert span() == "speculation_off", "the trial was won"
        world.supervisor.look()
        assert len(world.fleet.running()) == 1 and world.ask() == "1"
        world.fleet.prompt_tokens = 1
        assert span() == "speculation_on" and world.ask() == "1"


def test_a_window_that_ends_well_frees_the_displaced_engine(tmp_path: Path) -> None:
    with serving(tmp_path, watch=WATCH.model_copy(update={"window_s": 0.2})) as world:
        world.promote("2")
        time.sleep(0.3)
        world.supervisor.look()
        world.supervisor.look()
        assert world.kinds()[-1] == "proven" and world.fleet.running() == ["2"]


def test_what_is_not_admitted_or_fails_its_probe_gets_no_request(tmp_path: Path) -> None:
    plans = {"2": Plan(refused="it is not lossless"), "3": Plan(fault="out of memory")}
    with serving(tmp_path, plans=plans) as world:
        world.registry.forbidden = {"4"}
        world.promote("4")
        world.promote("3")
        assert world.registry.taken_back == [], "nothing was shown of the draft itself"
        world.promote("2")
        assert [(e.version, e.reason) for e in world.told if e.event == "refused"] == [
            ("4", "version 4 may not serve"),
            ("3", "out of memory"),
            ("2", "it is not lossless"),
        ]
        assert world.registry.taken_back == [("2", "it is not lossless")]
        assert world.traffic(5) == {"1"} and world.fleet.running() == ["1"]


@pytest.mark.parametrize("trouble", [VerifierError("it was deleted"), DISK_FULL, ValueError("a tag: 1,63")])
def test_an_absent_or_broken_registry_changes_nothing_and_a_rollback_waits_for_it(
    tmp_path: Path, trouble: Exception
) -> None:
    with serving(tmp_path, plans={"2": Plan(al=1.1)}) as world:
        world.promote("2")
        world.traffic(20)
        world.registry.trouble = trouble
        for _ in range(3):
            world.supervisor.look()
            assert world.ask() == "1", "traffic does not wait for the registry"
        assert world.registry.champion == "2" and world.kinds().count("registry_away") == 1
        world.registry.trouble = None
        world.supervisor.look()
        assert world.registry.champion == "1" and world.kinds()[-1] == "registry_back"
        assert world.traffic(3) == {"1"}


def test_a_rollback_by_hand_within_the_window_takes_the_engine_that_stands_by(tmp_path: Path) -> None:
    with serving(tmp_path) as world:
        world.promote("2")
        world.promote("1")
        assert world.kinds()[-1] == "rolled" and world.ask() == "1" and len(world.fleet.engines) == 2
        world.supervisor.look()
        assert world.fleet.running() == ["1"]


def test_with_room_for_one_engine_it_says_how_long_nothing_answered(tmp_path: Path) -> None:
    with serving(tmp_path, plans={"2": Plan(al=1.1), "3": Plan(fault="broken")}, engines="in-place") as world:
        world.promote("3")
        assert world.told[-1].reason == "broken" and world.ask() == "1", "what served before serves again"
        world.promote("2")
        rolled = world.told[-1]
        assert rolled.event == "rolled" and "nothing answered for" in rolled.reason and rolled.seconds is not None
        assert world.fleet.running() == ["2"]
        world.traffic(20)
        world.supervisor.look()
        assert world.kinds()[-1] == "rolled_back" and world.fleet.running() == ["1"] and world.ask() == "1"


@pytest.mark.parametrize("gone", ["1", "2"])
def test_in_place_nothing_is_ended_for_what_could_not_be_started(tmp_path: Path, gone: str) -> None:
    """Neither for a version whose files are gone, nor where those of what serves are: it could not come back."""
    with serving(tmp_path, engines="in-place") as world:
        admitted = world.registry.admit("2")
        world.registry.admit = lambda version: admitted  # type: ignore[method-assign]
        shutil.rmtree(world.registry.verifier(gone))
        world.promote("2")
        assert world.kinds()[-1] == "refused" and world.ask() == "1"
        assert len(world.fleet.engines) == 1, "it went on without a pause"


@pytest.mark.parametrize("by", ["roll", "rollback", "trial"])
def test_where_the_old_engine_does_not_start_again_either_both_causes_are_told(tmp_path: Path, by: str) -> None:
    plans = {"2": Plan(al=1.1)}
    with serving(tmp_path, plans=plans, engines="in-place", auto_disable={"mode": "on"}) as world:
        causes = "nothing serves: it is broken; and version 1, .* does not start again: out of memory"
        wanted = "2"
        if by == "rollback":
            world.promote("2")
            world.traffic(20)
            causes = "nothing serves: out of memory; and version 2, .* does not start again: it is broken"
        elif by == "trial":
            cast(Any, world.supervisor)._economy.look = lambda *now, **how: Advice("drafting", "they pay again")
            causes, wanted = "nothing serves: out of memory; and version 1, .* out of memory", "1"
        world.fleet.plans = {"1": Plan(fault="out of memory"), "2": Plan(fault="it is broken")}
        with pytest.raises(EngineError, match=causes):
            world.promote(wanted)


def test_without_an_engine_clients_are_told_when_to_come_again(tmp_path: Path) -> None:
    with serving(tmp_path) as world:
        world.fleet.vacate()
        answer = httpx.post(f"{world.fleet.address}/v1/chat/completions", json={})
        assert answer.status_code == 503 and answer.headers["Retry-After"] == "5" and "error" in answer.json()


def test_only_what_clients_need_is_let_through(tmp_path: Path) -> None:
    with serving(tmp_path) as world:
        found = {path: httpx.get(world.fleet.address + path).status_code for path in ("/health", "/metrics", "/reset")}
        assert found == {"/health": 200, "/metrics": 403, "/reset": 403}


def test_what_was_counted_is_left_for_the_watch_over_drift(tmp_path: Path) -> None:
    with serving(tmp_path) as world:
        world.supervisor.look()
        world.traffic(20)
        time.sleep(0.02)
        world.supervisor.look()
        [window] = read_windows(tmp_path, "chat")
        assert (window.version, window.drafts, window.accepted) == ("1", 200, 200)


def test_what_cannot_be_told_or_noted_ends_no_serving_and_is_noted_later(tmp_path: Path) -> None:
    """A full disk, and `draftsmith serve | tee` whose tee has ended."""
    with serving(tmp_path) as world:
        cast(Any, world.supervisor)._sink = raising(BrokenPipeError("no reader"))
        blocked = tmp_path / "served"
        blocked.write_text("where the statistics' directory would be")
        world.supervisor.look()
        for _ in range(2):
            world.traffic(20)
            time.sleep(0.02)
            world.supervisor.look()
            if blocked.is_file():
                blocked.unlink()
        [window] = read_windows(tmp_path, "chat")
        assert (window.version, window.drafts) == ("1", 400)
        world.promote("2")
        assert world.ask() == "2"


@pytest.mark.parametrize(("drain_timeout_s", "left"), [(30, ["1", "2"]), (0.001, ["2"])])
def test_a_proxy_that_is_slow_to_answer_ends_no_serving(
    tmp_path: Path, drain_timeout_s: float, left: list[str]
) -> None:
    with serving(tmp_path, drain_timeout_s=drain_timeout_s) as world:
        world.promote("2")
        world.fleet.retire_standby()
        proxy = cast(Any, world.fleet)._proxy
        proxy.command = raising(EngineError("HAProxy has not answered"))
        world.supervisor.look()
        assert world.fleet.running() == left
        del proxy.command
        world.supervisor.look()
        assert world.ask() == "2" and world.fleet.running() == ["2"]


@pytest.mark.parametrize("engines", ["beside", "in-place"])
def test_an_engine_that_the_proxy_does_not_take_is_ended(tmp_path: Path, engines: str) -> None:
    with serving(tmp_path, engines=engines) as world:
        proxy = cast(Any, world.fleet)._proxy
        take = proxy.open

        def refuse_once(slot: str, url: str) -> None:
            proxy.open = take
            raise EngineError("HAProxy has not answered")

        proxy.open = refuse_once
        world.promote("2")
        assert world.told[-1].reason == "HAProxy has not answered"
        assert world.ask() == "1" and world.fleet.running() == ["1"]


def test_a_proxy_that_ends_is_started_again(tmp_path: Path) -> None:
    with serving(tmp_path) as world:
        world.promote("2")
        cast(Any, world.fleet)._proxy.stop()
        world.supervisor.look()
        assert world.ask() == "2"


def test_a_taken_port_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with serving(tmp_path) as world, pytest.raises(ConfigError, match=r"serve\.port"):
        Proxy(tmp_path / "other", tmp_path, "127.0.0.1", httpx.URL(world.fleet.address).port or 0, request_timeout_s=5)


@pytest.mark.parametrize("signalled", ["its group", "all that runs below it", "the one that looks after it"])
def test_whoever_stops_it_requests_in_flight_end_first_or_were_cut_by_them(tmp_path: Path, signalled: str) -> None:
    """`timeout` and a terminal signal the group, systemd may signal every process, and `supervise` what it started."""
    program = (
        "import sys; from pathlib import Path; from tests.integration.test_serving import serve_until_stopped\n"
        "serve_until_stopped(Path(sys.argv[1]))"
    )
    command, log = [sys.executable, "-c", program, str(tmp_path)], tmp_path / "log"
    process = supervise(command, name="serve", home=tmp_path / "outer", log=log, env=child_environment())
    with process, await_address(log, process) as http:
        with http.stream("POST", "/v1/chat/completions", json={"stream": 20}) as reply:
            pieces = reply.iter_bytes()
            received = next(pieces)
            if signalled == "its group":
                os.killpg(process.group, signal.SIGTERM)
            elif signalled == "the one that looks after it":
                os.kill(process.pid, signal.SIGTERM)
            else:
                for pid in supervisor.descendants(process.pid):
                    os.kill(pid, signal.SIGTERM)
            if signalled == "all that runs below it":
                with pytest.raises(httpx.RemoteProtocolError):
                    b"".join(pieces)
            else:
                assert received + b"".join(pieces) == b"1" * 20
        assert process.wait(30) == 130, log.read_text()


@pytest.mark.parametrize("engines", ["beside", "in-place"])
@pytest.mark.parametrize("during", ["a start", "a call to MLflow"])
def test_a_signal_ends_serving_whatever_is_under_way(tmp_path: Path, engines: str, during: str) -> None:
    """No failure of the roll: nothing is refused, and no engine is started for what was ended."""
    fleet, registry = counting_fleet(tmp_path, engines=engines, poll_s=0.01), Registry(tmp_path)
    start, admit, told = fleet.start, registry.admit, list[ServeEvent]()
    again = threading.Timer(20, os.kill, (os.getpid(), signal.SIGTERM))  # for whom the first was not enough

    def stopped(version: str) -> None:
        if version == "2":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        registry.champion = "2"

    def start_and_stop(version: ServedVersion, *, speculate: bool = True) -> Replica:
        stopped(version.version if during == "a start" else "1")
        return start(version, speculate=speculate)

    def admit_and_stop(version: str) -> ServedVersion:
        try:
            stopped(version if during == "a call to MLflow" else "1")
        except Exception as error:  # as MLflow does
            raise RegistryError("the request failed") from error
        return admit(version)

    fleet.start, registry.admit = start_and_stop, admit_and_stop  # type: ignore[method-assign]
    again.start()
    with pytest.raises(Interrupted, match="SIGTERM"):
        Supervisor("chat", registry, fleet.config, fleet, tmp_path, told.append).run()
    again.cancel()
    assert [event.event for event in told if event.event != "rolling"] == ["starting", "ready", "stopping", "stopped"]
    assert [engine.version for engine in fleet.engines] == ["1"] and fleet.running() == []


def raising(error: Exception) -> Any:
    """A function that fails, whatever it is given."""

    def fail(*given: object) -> NoReturn:
        raise error

    return fail


@contextmanager
def await_address(log: Path, process: SupervisedProcess) -> Iterator[httpx.Client]:
    """A client of the first address in the log, once an engine answers there."""
    while not log.read_text().startswith("http://"):
        assert process.poll() is None, log.read_text()
        time.sleep(0.05)
    with httpx.Client(base_url=log.read_text().splitlines()[0], trust_env=False) as http:
        while http.get("/health").status_code != 200:
            time.sleep(0.05)
        yield http


def test_a_killed_supervisor_leaves_no_proxy(tmp_path: Path) -> None:
    port = free_port()
    program = (
        "import sys, time; from pathlib import Path; from speculators_core.serving.proxy import Proxy\n"
        "root = Path(sys.argv[1]); Proxy(root / 'p', root, '127.0.0.1', int(sys.argv[2]), request_timeout_s=5)\n"
        "print('up', flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", program, str(tmp_path), str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=child_environment(tmp_path)) as child:
        assert child.stdout is not None and child.stdout.readline() == "up\n"
        assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 503
        child.kill()
    deadline = time.monotonic() + 20
    with pytest.raises(httpx.ConnectError):
        while time.monotonic() < deadline:
            httpx.get(f"http://127.0.0.1:{port}/health")
            time.sleep(0.1)
