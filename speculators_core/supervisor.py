"""The supervisor: a small process between a command and whoever asked for it.

It reads one JSON request from its standard input, starts the command in a session of its own, answers with one
JSON line and then watches. The same pipe is the lifeline: when it closes, because the parent finished, crashed
or was killed with SIGKILL, every process below is ended. A parent-death signal could not do that: it fires when
the forking *thread* ends and does not reach grandchildren.

Run as a file with `python -I`, standard library only (the folder of this file must never be on its path: it holds
a `types.py`). Linux: it reads /proc. `speculators_core.processes` is the side that callers use.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TIMED_OUT = 124
"""Exit status when the command outlived its time limit, as coreutils' `timeout` has it."""
MARK = "DRAFTSMITH_SUPERVISED"
"""Environment variable that every supervised process inherits; its value is unique to the start."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_POLL_S = 0.1
_RECORD_S = 1.0
_SWEEP_S = 5.0


def start_ticks(pid: int) -> int | None:
    """Start time of a process, in ticks since boot (/proc/PID/stat, field 22); None when it is gone, or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def descendants(root: int) -> list[int]:
    """Every live process below `root`, whatever session or group it moved to."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
            except OSError:
                continue
            if fields[0] not in (b"Z", b"X"):
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    found: list[int] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def send(pid: int, signum: int) -> None:
    """Signal one process; a process that is gone already is fine."""
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        return


def boot_id() -> str:
    """Identity of this boot: start ticks are comparable only within it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class Supervisor:
    """Watches one command: `run` returns the exit status to leave with."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.request = request
        self.grace_s = float(request["grace_s"])
        self.asked_to_stop = False
        self.record_path = Path(request["records"]) / f"{request['name']}-{os.getpid()}.json"
        self.recorded: dict[int, int] = {}
        self._received = b""

    def start(self) -> subprocess.Popen[bytes]:
        """Start the command in its own session; its processes come back to us when their parents die."""
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        with Path(self.request["log"]).open("ab") as log:
            return subprocess.Popen(
                self.request["argv"],
                env={**self.request["env"], MARK: self.request["mark"]},
                cwd=self.request["cwd"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # we have one thread, so this signal means that the supervisor itself was killed
                preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
            )

    def record(self, child: int) -> None:
        """Write the pid file: who is below us, with start times; rewritten only when that changed."""
        members = {pid: ticks for pid in descendants(os.getpid()) if (ticks := start_ticks(pid)) is not None}
        if members == self.recorded:
            return
        self.recorded = members
        parent = self.request["parent"]
        content = {
            "name": self.request["name"],
            "owner": self.request["owner"],
            "boot": boot_id(),
            "mark": self.request["mark"],
            "supervisor": [os.getpid(), start_ticks(os.getpid())],
            "parent": parent,
            "group": child,
            "members": [[pid, ticks] for pid, ticks in sorted(members.items())],
            "argv": self.request["argv"],
            "log": self.request["log"],
        }
        draft = self.record_path.with_suffix(".tmp")
        draft.write_text(json.dumps(content, indent=1))
        draft.replace(self.record_path)

    def stop_wanted(self) -> bool:
        """Whether the parent is gone, closed the pipe, or asked for a stop; waits one poll at most."""
        if self.asked_to_stop or os.getppid() != self.request["parent"][0]:
            return True
        readable, _, _ = select.select([0], [], [], _POLL_S)
        if not readable:
            return False
        received = os.read(0, 4096)
        self._received += received
        if b"\n" in self._received:
            self.grace_s = float(json.loads(self._received.split(b"\n", 1)[0])["grace_s"])
            return True
        return not received

    def sweep(self, grace_s: float) -> None:
        """End every process below; returns when none is left.

        SIGTERM to the command alone, which may need its own processes to end well and tells them itself (vLLM's engine
        dies of a second one while its connector writes what it owes); to all others once the command has ended;
        SIGKILL to what is left after the grace.
        """
        send(self.child.pid, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        give_up = deadline + _SWEEP_S
        all_asked = False
        while left := descendants(os.getpid()):
            if time.monotonic() > give_up:
                return  # unkillable (stuck in the kernel): the record stays for the reaper
            if not all_asked and self.child.poll() is not None:
                all_asked = True
                for pid in left:
                    send(pid, signal.SIGTERM)
            if time.monotonic() > deadline:
                for pid in left:
                    send(pid, signal.SIGKILL)
            time.sleep(0.05)
            self._collect()
        self.record_path.unlink(missing_ok=True)

    def _collect(self) -> None:
        """Wait for adopted children, so that no zombie stays."""
        for pid in list(self.recorded):
            if pid != self.child.pid:
                try:
                    os.waitpid(pid, os.WNOHANG)
                except ChildProcessError:
                    continue
        self.child.poll()

    def run(self) -> int:
        """Start, report, watch, clean up."""
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, self._on_signal)
        try:
            self.child = self.start()
        except OSError as error:
            self._report({"error": str(error)})
            return 127
        self.record(self.child.pid)
        self._report({"group": self.child.pid})
        limit = self.request["timeout_s"]
        deadline = float("inf") if limit is None else time.monotonic() + limit
        next_record = time.monotonic() + _RECORD_S
        timed_out = False
        while self.child.poll() is None:
            if self.stop_wanted():
                break
            if time.monotonic() > deadline:
                timed_out = True
                break
            if time.monotonic() > next_record:
                self.record(self.child.pid)
                next_record = time.monotonic() + _RECORD_S
        self.sweep(self.grace_s if self.child.poll() is None else 2.0)
        status = self.child.poll()
        if timed_out or status is None:
            return TIMED_OUT
        return status if status >= 0 else 128 - status

    def _report(self, answer: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()

    def _on_signal(self, signum: int, frame: object) -> None:
        self.asked_to_stop = True


def read_request() -> dict[str, Any]:
    """The first line of standard input, read without a buffer: what follows belongs to the lifeline."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            raise SystemExit(1)  # the parent died before it had asked
        line += byte
    request: dict[str, Any] = json.loads(line)
    return request


if __name__ == "__main__":
    sys.exit(Supervisor(read_request()).run())
