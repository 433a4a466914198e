from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tasks.adapters.prefect_server import prefect_api
from tasks.adapters.settings import apply_environment
from tests.environment import child_environment

CHILDREN = Path(__file__).with_name("prefect_children.py")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def environ(home: Path) -> dict[str, str]:
    """Environment of a command with a private Prefect server."""
    return {**child_environment(home), "HOME": str(home / "user")}


@pytest.fixture(scope="module")
def served_environ(environ: dict[str, str]) -> Iterator[dict[str, str]]:
    """The same with a Prefect server that runs already."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("PREFECT")]:
            patch.delenv(name)
        with prefect_api(apply_environment(dict(environ))) as api:
            api.wait()
            yield {**environ, "PREFECT_API_URL": api.url}


def start(environ: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(CHILDREN), *arguments],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_child(home: Path, process: subprocess.Popen[str]) -> dict[str, Any]:
    path = home / "child.json"
    deadline = time.monotonic() + 90
    while not path.exists():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[1]
        time.sleep(0.05)
    found: dict[str, Any] = json.loads(path.read_text())
    path.unlink()
    return found


def gone(pid: int, within_s: float) -> bool:
    """Whether a process ends in time (a zombie counts as ended)."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


def test_only_what_another_try_may_mend_is_retried(home: Path, environ: dict[str, str]) -> None:
    process = start(environ, "retries")
    output, errors = process.communicate(timeout=180)
    assert process.returncode == 0, errors
    found = json.loads(output.splitlines()[-1])
    assert found["attempts"] == {
        "EngineError": 3,
        "RegistryError": 3,
        "ConfigError": 1,
        "DiskSpaceError": 1,
        "Interrupted": 1,
        "ValueError": 1,
    }
    assert found["results"]["EngineError"] == "EngineError", "the third try's result"
    assert found["results"]["ConfigError"] == "ConfigError", "the error arrives as itself"
    assert (found["serializer"], found["analytics"]) == ("json", False)
    assert found["home"] == str(home / "prefect")
    assert (home / "prefect" / "prefect.db").is_file()
    assert not (home / "user" / ".prefect").exists(), "the user's own Prefect is left alone"
    assert gone(found["server_pid"], 5)
    assert "Traceback" not in errors.split("Finished in state")[-1]


def test_what_prefect_shows_holds_no_secret(served_environ: dict[str, str]) -> None:
    output, errors = (process := start(served_environ, "show", "https://me:hunter2@gpu/x")).communicate(timeout=300)
    assert process.returncode == 0, errors
    found = json.loads(output.splitlines()[-1])
    assert set(found) == {"stage-evaluate", "report-chat"}
    for text in found.values():
        assert "hunter2" not in text and "[redacted]@gpu/x" in text


def test_a_killed_flow_leaves_nothing_behind(home: Path, environ: dict[str, str]) -> None:
    process = start(environ, "hold_child")
    child = wait_for_child(home, process)
    process.kill()
    assert gone(child["group"], 20)
    process.communicate(timeout=30)
    assert no_process_left(home), "neither an engine nor Prefect's private server"


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_flow_ends_its_children(
    home: Path, served_environ: dict[str, str], sent: signal.Signals
) -> None:
    process = start(served_environ, "hold_child")
    child = wait_for_child(home, process)
    process.send_signal(sent)
    assert gone(child["group"], 20)
    process.communicate(timeout=30)


def test_the_hook_ends_the_children_of_its_run_alone(home: Path, served_environ: dict[str, str]) -> None:
    process = start(served_environ, "hold_child")
    child = wait_for_child(home, process)
    try:
        start(served_environ, "end_as_hook", "00000000-0000-0000-0000-000000000000").communicate(timeout=60)
        assert not gone(child["group"], 0.2), "another run's cancel leaves it alone"
        done = start(served_environ, "end_as_hook", child["flow_run_id"])
        assert done.communicate(timeout=60)[1] == "" and done.returncode == 0
        assert gone(child["group"], 1)
        assert process.poll() is None, "the flow's own process is Prefect's to end"
    finally:
        process.kill()
        process.communicate()


def test_a_cancel_in_the_ui_ends_the_children_of_a_served_flow(home: Path, served_environ: dict[str, str]) -> None:
    runner = start(served_environ, "serve")
    try:
        api = httpx.Client(base_url=served_environ["PREFECT_API_URL"] + "/", timeout=30)
        deployment = wait_for(lambda: api.post("deployments/filter", json={}).json(), runner)[0]["id"]
        run = api.post(f"deployments/{deployment}/create_flow_run", json={"state": {"type": "SCHEDULED"}}).json()
        child = wait_for_child(home, runner)
        assert child["flow_run_id"] == run["id"]
        started = time.monotonic()
        api.post(f"flow_runs/{run['id']}/set_state", json={"state": {"type": "CANCELLING"}}).raise_for_status()
        assert gone(child["group"], 30)
        assert gone(child["pid"], 30)
        assert time.monotonic() - started < 30
    finally:
        runner.send_signal(signal.SIGINT)
        runner.communicate(timeout=30)


def wait_for(question: Callable[[], Any], process: subprocess.Popen[str]) -> Any:
    deadline = time.monotonic() + 60
    while not (answer := question()):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[1]
        time.sleep(0.2)
    return answer


def no_process_left(home: Path) -> bool:
    """Whether every process that has this state root in its environment ends within 15 seconds."""
    wanted = f"DRAFTSMITH_HOME={home}".encode()
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline:
        left = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                    left.append(entry.name)
            except OSError:
                continue
        if not left:
            return True
        time.sleep(0.1)
    return False
