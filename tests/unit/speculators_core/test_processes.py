from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from speculators_core import processes, supervisor
from speculators_core.errors import DraftsmithError
from speculators_core.processes import kill_all, reap_orphans, supervise
from tests.environment import child_environment

ROOT = Path(__file__).resolve().parents[3]


def until(condition: Callable[[], bool], seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def alive(pid: int) -> bool:
    return supervisor.start_ticks(pid) is not None


def record(home: Path) -> dict:
    [path] = (home / "engines").glob("*.json")
    return json.loads(path.read_text())


def family(home: Path, size: int) -> list[int]:
    """Pids of the supervised processes, once the pid file names `size` of them."""
    assert until(lambda: len(record(home)["members"]) == size), record(home)
    return [pid for pid, _ in record(home)["members"]]


# a command with a child in its group, one in a session of its own, and one that ignores SIGTERM
FAMILY = "sleep 300 & setsid sleep 300 & (trap '' TERM; sleep 300; sleep 300) & wait"


def test_status_output_and_pid_file_of_a_command_that_ends(tmp_path: Path) -> None:
    process = supervise(["sh", "-c", "echo out; echo err >&2; exit 3"], name="x", home=tmp_path, log=tmp_path / "l")
    assert process.wait(10) == process.poll() == 3
    assert (tmp_path / "l").read_text() == "out\nerr\n"
    assert list((tmp_path / "engines").iterdir()) == []


def test_a_signal_is_told_as_a_shell_does(tmp_path: Path) -> None:
    process = supervise(["sh", "-c", "kill -9 $$"], name="x", home=tmp_path, log=tmp_path / "l")
    assert process.wait(10) == 137


def test_environment_is_laid_over_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", "kept")
    monkeypatch.setenv("DROPPED", "dropped")
    supervise(
        ["sh", "-c", "echo $KEPT-$ADDED-$DROPPED"],
        name="x",
        home=tmp_path,
        log=tmp_path / "l",
        env={"ADDED": "added", "DROPPED": None},
    ).wait(10)
    assert (tmp_path / "l").read_text() == "kept-added-\n"


def test_a_command_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DraftsmithError, match="cannot start thing"):
        supervise(["/no/such/program"], name="thing", home=tmp_path, log=tmp_path / "l")
    assert list((tmp_path / "engines").iterdir()) == []


def test_the_child_has_a_session_of_its_own(tmp_path: Path) -> None:
    with supervise(["sleep", "300"], name="x", home=tmp_path, log=tmp_path / "l") as process:
        assert os.getsid(process.group) == process.group != os.getsid(0)
        assert os.getsid(process.pid) not in (os.getsid(0), process.group)


def test_stop_ends_everything_below_and_is_idempotent(tmp_path: Path) -> None:
    process = supervise(["sh", "-c", FAMILY], name="x", home=tmp_path, log=tmp_path / "l")
    pids = family(tmp_path, 5)
    process.stop(grace_s=0.5)
    assert [pid for pid in pids if alive(pid)] == []
    process.stop()
    assert process.poll() is not None
    assert list((tmp_path / "engines").iterdir()) == []


def test_a_command_that_is_stopped_still_has_what_runs_in_a_session_of_its_own(tmp_path: Path) -> None:
    command = (
        "setsid sleep 300 & helper=$!; trap 'sleep 0.3; kill -0 $helper && echo there; exit' TERM; sleep 300 & wait"
    )
    process = supervise(["sh", "-c", command], name="x", home=tmp_path, log=tmp_path / "l")
    pids = family(tmp_path, 3)
    process.stop()
    assert (tmp_path / "l").read_text() == "there\n"
    assert [pid for pid in pids if alive(pid)] == []


def test_a_child_hears_of_a_stop_from_its_parent_alone(tmp_path: Path) -> None:
    """vLLM's server tells its engine, which a second signal would kill in the middle of its shutdown."""
    child = "trap 'echo heard; n=x$n; [ $n != xx ] || exit' TERM; while :; do sleep 0.1; done"
    command = f"({child}) & child=$!; trap 'kill -TERM $child; sleep 1; echo ended; exit' TERM; sleep 300 & wait"
    process = supervise(["bash", "-c", command], name="x", home=tmp_path, log=tmp_path / "l")
    family(tmp_path, 4)
    process.stop()
    told = [line for line in (tmp_path / "l").read_text().split() if line in ("heard", "ended")]
    assert told == ["heard", "ended", "heard"]


def test_what_a_finished_command_leaves_behind_is_ended(tmp_path: Path) -> None:
    process = supervise(
        ["sh", "-c", "setsid sleep 300 & sleep 300 & sleep 1.5; exit 0"], name="x", home=tmp_path, log=tmp_path / "l"
    )
    pids = family(tmp_path, 4)
    assert process.wait(15) == 0
    assert [pid for pid in pids if alive(pid)] == []


def test_a_time_limit_acts_on_the_process(tmp_path: Path) -> None:
    process = supervise(["sh", "-c", FAMILY], name="x", home=tmp_path, log=tmp_path / "l", timeout_s=1.5, grace_s=0.5)
    pids = family(tmp_path, 5)
    assert process.wait(30) == processes.TIMED_OUT == 124
    assert [pid for pid in pids if alive(pid)] == []


def test_waiting_in_vain_leaves_the_process_alone(tmp_path: Path) -> None:
    with supervise(["sleep", "300"], name="x", home=tmp_path, log=tmp_path / "l") as process:
        with pytest.raises(TimeoutError):
            process.wait(0.05)
        assert process.poll() is None


def start_parent(home: Path, *, forks: bool = False) -> subprocess.Popen[str]:
    """Another Python process that supervises FAMILY under `home`, and perhaps has a forked child that lives on."""
    program = f"""
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from speculators_core.processes import supervise
home = Path({str(home)!r})
process = supervise(["sh", "-c", {FAMILY!r}], name="x", home=home, log=home / "l", grace_s=0.5)
fork = os.fork() if {forks} else -1
if fork == 0:
    time.sleep(20)
    os._exit(0)
print(process.pid, fork, flush=True)
time.sleep(300)
"""
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("forks", [False, True], ids=["plain", "a fork of the parent keeps the pipe open"])
def test_kill_minus_nine_of_the_parent_leaves_nothing(tmp_path: Path, forks: bool) -> None:
    parent = start_parent(tmp_path, forks=forks)
    assert parent.stdout is not None
    supervisor_pid, fork = (int(word) for word in parent.stdout.readline().split())
    pids = [supervisor_pid, *family(tmp_path, 5)]
    try:
        parent.kill()
        parent.wait()
        assert until(lambda: not any(alive(pid) for pid in pids), 20)
        assert list((tmp_path / "engines").iterdir()) == []
    finally:
        if fork > 0:
            os.kill(fork, signal.SIGKILL)


def test_the_next_start_reaps_what_a_killed_supervisor_left(tmp_path: Path) -> None:
    parent = start_parent(tmp_path)
    assert parent.stdout is not None
    supervisor_pid = int(parent.stdout.readline().split()[0])
    pids = family(tmp_path, 5)
    os.kill(supervisor_pid, signal.SIGSTOP)  # so that it cannot notice its parent's death
    parent.kill()
    parent.wait()
    os.kill(supervisor_pid, signal.SIGKILL)
    assert until(lambda: not alive(supervisor_pid))
    assert any(alive(pid) for pid in pids)
    supervise(["true"], name="next", home=tmp_path, log=tmp_path / "l").wait(10)
    assert [pid for pid in pids if alive(pid)] == []
    assert list((tmp_path / "engines").iterdir()) == []


def test_a_process_that_hid_from_the_pid_file_is_found_by_its_mark(tmp_path: Path) -> None:
    process = supervise(["sleep", "300"], name="x", home=tmp_path, log=tmp_path / "l")
    mark = record(tmp_path)["mark"]
    stray = subprocess.Popen(
        ["sleep", "300"], env={**child_environment(), supervisor.MARK: mark}, start_new_session=True
    )
    try:
        assert kill_all(tmp_path) == ["x"]
        assert stray.wait(5) == -signal.SIGKILL
    finally:
        stray.kill()
        process.stop()


def test_a_reused_pid_is_never_signalled(tmp_path: Path) -> None:
    process = supervise(["sleep", "300"], name="x", home=tmp_path, log=tmp_path / "l")
    stale = record(tmp_path)
    process.stop()
    stranger = subprocess.Popen(["sleep", "300"], start_new_session=True)
    ticks = supervisor.start_ticks(stranger.pid)
    assert ticks is not None
    stale |= {
        "supervisor": [stranger.pid, ticks - 1],
        "parent": [stranger.pid, ticks - 1],
        "group": stranger.pid,
        "members": [[stranger.pid, ticks - 1]],
    }
    (tmp_path / "engines" / "x-1.json").write_text(json.dumps(stale))
    try:
        assert reap_orphans(tmp_path) == []
        assert kill_all(tmp_path) == []
        assert stranger.poll() is None
        assert list((tmp_path / "engines").iterdir()) == []
    finally:
        stranger.kill()
        stranger.wait()


def test_pid_files_of_an_earlier_boot_are_dropped(tmp_path: Path) -> None:
    process = supervise(["sleep", "300"], name="x", home=tmp_path, log=tmp_path / "l")
    try:
        path = next((tmp_path / "engines").glob("*.json"))
        path.write_text(json.dumps(record(tmp_path) | {"boot": "another"}))
        assert kill_all(tmp_path) == []
        assert not path.exists()
        assert process.poll() is None
    finally:
        process.stop()


def test_the_reaper_leaves_processes_of_living_parents(tmp_path: Path) -> None:
    with supervise(["sleep", "300"], name="x", home=tmp_path, log=tmp_path / "l") as process:
        assert reap_orphans(tmp_path) == []
        assert process.poll() is None


def test_kill_all_from_another_process_can_select_the_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(processes.OWNER_VARIABLE, "run-a")
    mine = supervise(["sh", "-c", FAMILY], name="a", home=tmp_path, log=tmp_path / "l")
    pids = family(tmp_path, 5)
    monkeypatch.setenv(processes.OWNER_VARIABLE, "run-b")
    other = supervise(["sleep", "300"], name="b", home=tmp_path, log=tmp_path / "l")
    program = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from speculators_core.processes import kill_all
print(*kill_all(Path({str(tmp_path)!r}), owner="run-a", grace_s=0.5))
"""
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=30)
    try:
        assert answer.stdout.split() == ["a"]
        assert until(lambda: mine.poll() is not None)
        assert [pid for pid in pids if alive(pid)] == []
        assert other.poll() is None
    finally:
        other.stop()
        mine.stop()
