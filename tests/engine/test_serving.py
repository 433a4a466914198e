"""`draftsmith serve` on the real engine: a bad draft by force, under load, and nothing left after a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from speculators_core.engine.runtime import Runtime
from speculators_core.lifecycle.promotion import audit_log
from tasks.adapters.prefect_server import free_port
from tasks.serve_process import serve_process
from tests.client_load import steady_load
from tests.environment import ROOT, child_environment
from tests.haproxy import needs_haproxy

sys.path.insert(0, str(Path(__file__).parent))
from loop import await_silence
from serving_world import DASH, MODEL, RARE, ask_for_dashes, serving_world

pytestmark = [pytest.mark.engine, pytest.mark.trial, needs_haproxy]
START_S = 900


def test_a_forced_draft_rolls_in_under_load_and_is_taken_back_and_a_kill_leaves_nothing(
    tmp_path: Path, verifier_dir: Path, runtime: Runtime
) -> None:
    with serving_world(tmp_path, verifier_dir, runtime) as world:
        good, bad = world.register(DASH), world.register(RARE, outcome="fail")
        world.promote(good)
        arguments = world.arguments(free_port())
        with serve_process(
            MODEL, home=world.home, log=tmp_path / "serve.log", events=tmp_path / "events.jsonl", arguments=arguments
        ) as serving:
            ready = serving.wait_for("ready", timeout_s=START_S)
            assert ready.version == good and ready.address
            with steady_load(ready.address, ask_for_dashes, clients=2) as load:
                load.await_answers(20, timeout_s=START_S)
                world.promote(bad, force=True)
                serving.wait_for("rolled", version=bad, timeout_s=START_S)
                back = serving.wait_for("rolled_back", timeout_s=START_S)
                load.await_answers(10, timeout_s=START_S)
            assert load.failures == []
            assert back.version == good and "acceptance length 1.0" in back.reason and " before: " in back.reason
            assert back.seconds is not None and back.seconds < 60
            assert world.champion() == good
            last = audit_log(world.home, MODEL)[-1]
            assert (last.action, last.from_version, last.who) == ("rollback", bad, "draftsmith serve")

            again = subprocess.run(
                [sys.executable, "-m", "flows.cli", "serve", MODEL, *world.arguments(free_port())],
                env=child_environment(world.home), cwd=ROOT, capture_output=True, text=True, check=False,
            )  # fmt: skip
            assert again.returncode == 2 and f"by process {serving.process.group}" in again.stderr, again.stderr

            os.kill(serving.process.group, signal.SIGKILL)
            await_silence(world.home)
