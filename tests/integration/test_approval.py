"""Approval: a deployment's run suspends, is answered through Prefect's API, starts over, and does what was said."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tasks.adapters.prefect_server import free_port
from tasks.adapters.settings import read_settings
from tasks.adapters.tracking import Tracking
from tests.environment import ROOT, child_environment

pytestmark = pytest.mark.trial  # a Prefect server with its services, and a flow that starts twice

FLOW = Path(__file__).with_name("approval_flow.py")


class World:
    """A Prefect server, the served deployment, and a registered version to ask about."""

    def __init__(self, home: Path) -> None:
        self.home, port = home, free_port()
        self.api = f"http://127.0.0.1:{port}/api"
        self.environ = {**child_environment(home), "PREFECT_API_URL": self.api, "PREFECT_RUNNER_POLL_FREQUENCY": "1"}
        self.processes: list[subprocess.Popen[bytes]] = []
        self.start("-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port), "--no-ui")
        self.until(lambda: self.answers())
        client = Tracking(read_settings({"DRAFTSMITH_HOME": str(home)})).client
        client.create_registered_model("chat")
        client.create_model_version("chat", source=str(home))
        self.tags = lambda: dict(client.get_model_version("chat", "1").tags)
        self.start(str(FLOW))
        self.deployment = self.until(lambda: self.first("/deployments/filter"))

    def start(self, *arguments: str) -> None:
        log = (self.home / "children.log").open("ab")
        environ = {
            k: v for k, v in self.environ.items() if arguments[:2] != ("-m", "prefect") or k != "PREFECT_API_URL"
        }
        self.processes.append(
            subprocess.Popen(
                [sys.executable, *arguments], env=environ, cwd=ROOT, stdout=log, stderr=log, start_new_session=True
            )
        )

    def stop(self) -> None:
        for process in self.processes:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def answers(self) -> bool:
        try:
            return httpx.get(f"{self.api}/health", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    def first(self, path: str) -> Any:
        found = httpx.post(f"{self.api}{path}", json={}, timeout=30).json()
        return found[0] if found else None

    def until(self, look: Any, timeout_s: float = 180) -> Any:
        deadline = time.monotonic() + timeout_s
        while not (found := look()):
            assert time.monotonic() < deadline, (self.home / "children.log").read_text()[-3000:]
            time.sleep(0.3)
        return found

    def state(self, run: str) -> str:
        return str(httpx.get(f"{self.api}/flow_runs/{run}", timeout=30).json()["state"]["name"])

    def ask(self) -> str:
        created = httpx.post(
            f"{self.api}/deployments/{self.deployment['id']}/create_flow_run", json={}, timeout=30
        ).json()
        self.until(lambda: self.state(created["id"]) == "Suspended")
        return str(created["id"])

    def answer(self, run: str, **values: object) -> None:
        done = httpx.post(f"{self.api}/flow_runs/{run}/resume", json={"run_input": values}, timeout=30)
        assert done.json()["status"] == "ACCEPT", done.text
        self.until(lambda: self.state(run) in ("Completed", "Failed", "Crashed"))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.stop()


def test_a_suspended_run_promotes_what_is_approved_and_nothing_else(world: World) -> None:
    run = world.ask()
    assert not (world.home / "outcome").exists(), "nothing moves before the answer"
    world.answer(run, approve=False, who="ann", why="not on a Friday")
    assert world.state(run) == "Completed"
    assert (world.home / "outcome").read_text() == " False"
    assert world.tags()["gate.approval.note"] == "refused by ann: not on a Friday"

    run = world.ask()
    world.answer(run, approve=True, who="bob", why="looks good")
    assert world.state(run) == "Completed"
    assert (world.home / "outcome").read_text() == "champion False"
    assert world.tags()["gate.approval"] == "approved"
    assert (world.home / "starts").read_text().count("start") == 4, "each run starts over when it is answered"
