"""Writers and readers of one store, killed at random: what was acknowledged must arrive, whole and once.

The protocol of both sides is that of an engine and a trainer: a writer acknowledges a key after its put, a reader
notes that it has the record before it deletes it. Notes are lines of files, so that a kill loses none.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import random
import signal
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import Any

import psutil

from hs_connectors import Handle, open_backend, open_reader, open_writer
from hs_connectors.errors import ConnectorError, RecordError, RecordTimeout
from hs_connectors.testing import assert_same, make_record
from hs_connectors.upkeep import collect

WRITERS, READERS, TOKENS = 2, 2, 400
_STALLED_S = 300
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_FORK = multiprocessing.get_context("fork")  # a child that had to import torch first would live for seconds


@dataclass
class Outcome:
    """What happened. Memory: growth of a writer and of a reader that lived from beginning to end, MiB."""

    backend: str
    acknowledged: int = 0
    kills: int = 0
    lost: list[str] = field(default_factory=list)
    corrupt: list[str] = field(default_factory=list)
    swept: int = 0
    left: list[str] = field(default_factory=list)
    growth_mib: tuple[float, float] = (0.0, 0.0)
    seconds: float = 0.0

    def line(self) -> str:
        return (
            f"{self.backend:9} {self.acknowledged:6} acknowledged  {self.kills:4} kills  {len(self.lost)} lost  "
            f"{len(self.corrupt)} corrupt  {self.swept:4} swept  {len(self.left)} left  "
            f"memory +{self.growth_mib[0]:.0f} / +{self.growth_mib[1]:.0f} MiB  {self.seconds:.0f} s"
        )


class _Notes:
    """Files of lines, one for each process and kind of note."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def add(self, kind: str, who: int, key: str) -> None:
        with (self.directory / f"{kind}-{who}").open("ab", buffering=0) as file:
            file.write(f"{key}\n".encode())

    def read(self, kind: str, who: int | None = None) -> list[str]:
        files = self.directory.glob(f"{kind}-{'*' if who is None else who}")
        return [line for file in sorted(files) for line in file.read_text().split("\n")[:-1]]


def run_chaos(
    backend: str,
    config: Mapping[str, Any],
    records: int,
    directory: Path,
    *,
    pause_s: tuple[float, float],
    grow_old: Callable[[], object],
) -> Outcome:
    """Move `records` records through the store; between two kills lies a pause of these bounds.

    `grow_old` is called when all is over, and makes what killed writers left old enough for the last sweep.
    """
    notes, chance, outcome = _Notes(directory), random.Random(0), Outcome(backend)
    started = time.monotonic()
    work: dict[str, Callable[[], None]] = {
        **{f"writer-{i}": lambda i=i: _write(backend, config, notes, i, records // WRITERS) for i in range(WRITERS)},
        **{f"reader-{i}": lambda i=i: _read(backend, config, notes, i, records) for i in range(READERS)},
    }
    running = {name: _start(task) for name, task in work.items()}
    lasting = [running[f"{kind}-0"] for kind in ("writer", "reader")]
    early: list[float] = []
    moved, moved_at = 0, started
    try:
        while any(process.is_alive() for process in running.values()):
            time.sleep(chance.uniform(*pause_s))
            done = len(notes.read("done"))
            if done != moved:
                moved, moved_at = done, time.monotonic()
            assert time.monotonic() - moved_at < _STALLED_S, f"nothing moves any more after {done} records"
            if not early and done > records // 5:
                early = [_memory(process) for process in lasting]
            if early and all(process.is_alive() for process in lasting):
                late = [_memory(process) for process in lasting]
                outcome.growth_mib = (late[0] - early[0], late[1] - early[1])
            victim = chance.choice([f"writer-{WRITERS - 1}", f"reader-{READERS - 1}"])
            if running[victim].is_alive():
                running[victim].kill()
                outcome.kills += 1
            running[victim].join()
            if running[victim].exitcode != 0:
                running[victim] = _start(work[victim])
            for name, process in running.items():
                assert process.exitcode in (None, 0, -9), f"{name} ended with {process.exitcode}"
    finally:
        for process in running.values():
            process.kill()
            process.join()
    outcome.acknowledged = len(notes.read("acknowledged"))
    outcome.lost, outcome.corrupt = notes.read("lost"), notes.read("corrupt")
    store = open_backend(backend, config)
    grow_old()
    outcome.swept = len(collect(store, -60, apply=True))
    outcome.left = [entry.key for entry in store.entries()]
    outcome.seconds = time.monotonic() - started
    return outcome


def _start(task: Callable[[], None]) -> multiprocessing.process.BaseProcess:
    process = _FORK.Process(target=_run, args=(task,))
    process.start()
    return process


def _run(task: Callable[[], None]) -> None:
    """The child's life: it dies with the test, and nothing of the test's own process runs at its end."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    try:
        task()
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _write(backend: str, config: Mapping[str, Any], notes: _Notes, who: int, quota: int) -> None:
    writer = open_writer(backend, config)
    for _ in range(quota - len(notes.read("acknowledged", who))):
        key = f"w{who}-{token_hex(8)}"
        writer.put(key, make_record(TOKENS, seed=zlib.crc32(key.encode())))
        notes.add("acknowledged", who, key)


def _read(backend: str, config: Mapping[str, Any], notes: _Notes, who: int, records: int) -> None:
    reader = open_reader(backend, config)
    done = notes.read("done", who)
    for key in done[-1:]:  # an earlier life may have ended between the note and the deletion
        reader.delete(Handle(backend, key))
    for key in _follow(notes, who, set(done), records):
        try:
            record = reader.get(Handle(backend, key), 0)
            assert_same(record, make_record(TOKENS, seed=zlib.crc32(key.encode())))
        except RecordTimeout:
            notes.add("lost", who, key)
        except (RecordError, AssertionError):
            notes.add("corrupt", who, key)
        except ConnectorError as error:
            raise AssertionError(key) from error
        notes.add("done", who, key)
        reader.delete(Handle(backend, key))


def _follow(notes: _Notes, who: int, noted: set[str], records: int) -> Iterator[str]:
    """This reader's share of the acknowledged keys, as they come, until all are."""
    while True:
        acknowledged = notes.read("acknowledged")
        for key in acknowledged:
            if zlib.crc32(key.encode()) % READERS == who and key not in noted:
                noted.add(key)
                yield key
        if len(acknowledged) >= records // WRITERS * WRITERS:
            return
        time.sleep(0.02)


def _memory(process: multiprocessing.process.BaseProcess) -> float:
    """MiB of its own; 0 where it has just ended."""
    try:
        memory = psutil.Process(process.pid).memory_info()
    except psutil.NoSuchProcess:
        return 0.0
    return (memory.rss - memory.shared) / (1 << 20)
