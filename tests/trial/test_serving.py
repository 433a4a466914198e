"""A day of serving, short: a promotion of a thousand requests, a rollback by hand, a villain, a stream at the end."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import httpx
import pytest

from speculators_core.engine.runtime import Runtime
from tasks.adapters.prefect_server import free_port
from tasks.serve_process import serve_process
from tests.client_load import steady_load
from tests.haproxy import needs_haproxy

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from conftest import runtime, verifier_dir  # noqa: F401  # fixtures
from loop import await_silence
from serving_world import DASH, DASHES, MODEL, RARE, ask_for_dashes, serving_world

pytestmark = [pytest.mark.engine, pytest.mark.trial, needs_haproxy]
START_S = 900
REQUESTS = 1000


def test_no_request_of_a_thousand_fails_while_versions_come_and_go(
    tmp_path: Path,
    verifier_dir: Path,  # noqa: F811
    runtime: Runtime,  # noqa: F811
) -> None:
    from tasks.versions import rollback_model

    with serving_world(tmp_path, verifier_dir, runtime) as world:
        first, second = world.register(DASH), world.register(DASH, salt=2.0)
        bad = world.register(RARE, outcome="fail")
        world.promote(first)
        arguments = world.arguments(free_port(), **{"watch.window_s": 20})
        with serve_process(
            MODEL, home=world.home, log=tmp_path / "serve.log", events=tmp_path / "events.jsonl", arguments=arguments
        ) as serving:
            address = serving.wait_for("ready", timeout_s=START_S).address
            assert address
            with steady_load(address, ask_for_dashes, clients=4) as load:
                load.await_answers(50, timeout_s=START_S)
                world.promote(second)
                rolled = serving.wait_for("rolled", version=second, timeout_s=START_S)
                load.await_answers(REQUESTS - len(load.answers), timeout_s=START_S)
                answered = len(load.answers)
                assert load.failures == []

                serving.wait_for("proven", version=second, timeout_s=START_S)
                seen = len(serving.events())
                rollback_model(MODEL, why="by hand")
                back = serving.wait_for("rolled", version=first, timeout_s=START_S, after=seen)
                assert back.seconds is not None and back.seconds < 60, "from a warm disk"

                seen = len(serving.events())
                world.promote(bad, force=True)
                taken = serving.wait_for("rolled_back", version=first, timeout_s=START_S, after=seen)
                assert taken.seconds is not None and taken.seconds < 5, "the displaced engine stood by"
            assert load.failures == [], f"of {len(load.answers)}"
            assert world.champion() == first
            print(
                f"{answered} requests over a promotion ({rolled.seconds} s), {len(load.answers)} in all, none failed;"
            )
            print(f"a rollback by hand took {back.seconds} s, the one of the villain {taken.seconds} s")

            lines: list[str] = []
            began = threading.Event()
            reader = threading.Thread(target=read_stream, args=(address, lines, began))
            reader.start()
            assert began.wait(60)
            os.kill(serving.process.group, signal.SIGTERM)
            reader.join()
            assert lines[-1] == "data: [DONE]", "a stream that had begun ends whole"
            assert serving.process.wait(120) == 130
            await_silence(world.home)


def read_stream(address: str, lines: list[str], began: threading.Event) -> None:
    """Read a long reply to its end."""
    body = {**DASHES, "max_tokens": 220, "stream": True}
    with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=300, trust_env=False) as reply:
        for line in reply.iter_lines():
            lines += [line] if line else []
            began.set()
