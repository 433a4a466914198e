"""Child processes that cannot outlive their parent, however it ends.

`supervise` starts a command below a supervisor (supervisor.py) that holds a pipe to us; `stop` is certain;
`reap_orphans` ends what earlier, killed supervisors left behind; `kill_all` is for a cancel hook, which runs in
another process and has nothing but the pid files. Pid files hold start times: a reused pid is never signalled.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from speculators_core import supervisor
from speculators_core.errors import DraftsmithError

TIMED_OUT = supervisor.TIMED_OUT
OWNER_VARIABLE = "DRAFTSMITH_RUN"
"""Environment variable naming the run that owns the processes started under it; `kill_all` can select by it."""

_KILL_S = 10.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SupervisedProcess:
    """A running command and its supervisor.

    pid: the supervisor's · group: the command's own process group (and session) · log: its output.
    """

    pid: int
    group: int
    log: Path
    _supervisor: subprocess.Popen[bytes] = field(repr=False, compare=False)

    def poll(self) -> int | None:
        """None while it runs; else its exit status: 128 + n after signal n, 124 after its time limit."""
        status = self._supervisor.poll()
        return status if status is None or status >= 0 else 128 - status

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for the end and return `poll()`; raises TimeoutError, and lets it run on, after `timeout_s`."""
        try:
            self._supervisor.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"process group {self.group} still runs after {timeout_s} s") from None
        status = self.poll()
        assert status is not None
        return status

    def stop(self, grace_s: float = 10) -> None:
        """End the command and everything it started; SIGTERM first, SIGKILL after `grace_s`. Idempotent, certain."""
        lifeline = self._supervisor.stdin
        assert lifeline is not None
        if not lifeline.closed:
            try:
                lifeline.write(json.dumps({"grace_s": grace_s}).encode() + b"\n")
                lifeline.close()
            except BrokenPipeError:
                pass
        try:
            self._supervisor.wait(grace_s + 10)
        except subprocess.TimeoutExpired:  # the supervisor itself hangs: suspended, or starved
            for pid in [*supervisor.descendants(self.pid), self.pid]:
                supervisor.send(pid, signal.SIGKILL)
            self._supervisor.wait()

    def __enter__(self) -> SupervisedProcess:
        """Itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop."""
        self.stop()


def supervise(
    argv: Sequence[str],
    *,
    name: str,
    home: Path,
    log: Path,
    env: Mapping[str, str | None] | None = None,
    timeout_s: float | None = None,
    grace_s: float = 10,
    cwd: Path | None = None,
    cores: Sequence[int] | None = None,
) -> SupervisedProcess:
    """Start a command that dies with us.

    `env` is laid over our own environment (None removes a variable). `timeout_s` acts on the process: it is ended and
    leaves with status 124. `grace_s` lies between SIGTERM and SIGKILL when the time is over, or we are. `cores` are the
    processors that it may use, where not all of ours. Output goes to `log` (appended). Orphans under `home` are reaped
    first. Raises DraftsmithError when the command cannot be started.
    """
    home = home.resolve()
    reap_orphans(home)
    records = _records(home)
    records.mkdir(parents=True, exist_ok=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    merged: dict[str, str | None] = {**os.environ, **(env or {})}
    pinned = [] if cores is None else ["taskset", "--cpu-list", ",".join(map(str, cores))]
    request = {
        "argv": [*pinned, *argv],
        "env": {key: value for key, value in merged.items() if value is not None},
        "cwd": None if cwd is None else str(cwd),
        "name": name,
        "owner": os.environ.get(OWNER_VARIABLE),
        "records": str(records),
        "log": str(log.resolve()),
        "mark": uuid.uuid4().hex,
        "parent": [os.getpid(), supervisor.start_ticks(os.getpid())],
        "timeout_s": timeout_s,
        "grace_s": grace_s,
    }
    with log.open("ab") as errors:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", supervisor.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,  # a Ctrl-C at the terminal is the parent's to handle
        )
    assert process.stdin is not None and process.stdout is not None
    with process.stdout as report:
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            answer = json.loads(report.readline() or "{}")
        except BrokenPipeError:
            answer = {}
    if "group" not in answer:
        process.stdin.close()
        process.wait()
        reason = answer.get("error", f"its supervisor ended with status {process.returncode}, see {log}")
        raise DraftsmithError(f"cannot start {name} ({argv[0]}): {reason}", mend="check that the program is there")
    return SupervisedProcess(process.pid, answer["group"], log, process)


def reap_orphans(home: Path) -> list[str]:
    """End processes whose parent died without their supervisor cleaning up; returns their names.

    Processes of a living parent are left alone, and so is every process that is not provably ours.
    """
    reaped = []
    for path, record in _read_records(home):
        if _alive(record["supervisor"]) and _alive(record["parent"]):
            continue
        if _end(record, grace_s=2):
            _log.warning("ended %s, left behind by process %d", record["name"], record["parent"][0])
            reaped.append(record["name"])
        path.unlink(missing_ok=True)
    return reaped


def kill_all(home: Path, *, owner: str | None = None, grace_s: float = 10) -> list[str]:
    """End every supervised process under `home`, or those of one owner (OWNER_VARIABLE); returns their names."""
    killed = []
    for path, record in _read_records(home):
        if owner is not None and record["owner"] != owner:
            continue
        if _end(record, grace_s=grace_s):
            killed.append(record["name"])
        path.unlink(missing_ok=True)
    return killed


def _records(home: Path) -> Path:
    return home / "engines"


def _read_records(home: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Pid files of this boot; those of an earlier boot name nothing that lives and are removed."""
    for path in sorted(_records(home).glob("*.json")):
        try:
            record: dict[str, Any] = json.loads(path.read_text())
        except FileNotFoundError:
            continue  # its supervisor finished meanwhile
        if record["boot"] == supervisor.boot_id():
            yield path, record
        else:
            path.unlink(missing_ok=True)


def _alive(identity: Sequence[int]) -> bool:
    pid, ticks = identity
    return supervisor.start_ticks(pid) == ticks


def _end(record: Mapping[str, Any], grace_s: float) -> bool:
    """Ask the supervisor, when it lives, to end its processes; kill what is left after the grace. True: some lived."""
    watcher = record["supervisor"]
    lived = _alive(watcher) or bool(_survivors(record))
    if _alive(watcher):
        supervisor.send(watcher[0], signal.SIGTERM)
        _wait_until(lambda: not _alive(watcher), grace_s)

    def gone() -> bool:
        left = _survivors(record)
        for pid in left:
            supervisor.send(pid, signal.SIGKILL)
        return not left

    _wait_until(gone, _KILL_S)
    _wait_until(lambda: not _alive(watcher), _KILL_S)  # it leaves by itself once nothing is below it
    if _alive(watcher):
        supervisor.send(watcher[0], signal.SIGKILL)
    return lived


def _wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


def _survivors(record: Mapping[str, Any]) -> set[int]:
    """Live processes that are provably the record's: by pid and start time, by descent from these, or by mark."""
    known = {member[0] for member in record["members"] if _alive(member)}
    found = set(known)
    for pid in known:
        found.update(supervisor.descendants(pid))
    mark = f"{supervisor.MARK}={record['mark']}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue  # ended meanwhile, or another user's
            if mark in environment.split(b"\0") and supervisor.start_ticks(int(entry.name)) is not None:
                found.add(int(entry.name))
    return found
