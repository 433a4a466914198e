"""A queue of writer threads between an engine that must not wait and a store that may be slow.

Bounded by bytes: the caller asks `has_room` first and keeps its data where it is (for the engine: in its
cache blocks) until there is. Every key that was submitted ends as a record or as an error marker.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from hs_connectors.contract import Record, Writer
from hs_connectors.errors import ConnectorError

log = logging.getLogger(__name__)
_RETRY_MARKERS_S = 1.0


@dataclass(frozen=True)
class SpoolState:
    """What a spool has done since it was made, and what waits in it now.

    written and failed: records · num_bytes: written, as submitted · lag_s: from submission to being visible, summed
    over written records · waiting, waiting_bytes, oldest_s: records not yet written, their bytes, age of the oldest.
    """

    written: int
    failed: int
    num_bytes: int
    lag_s: float
    waiting: int
    waiting_bytes: int
    oldest_s: float


@dataclass(frozen=True, eq=False)
class _Job:
    key: str
    num_bytes: int
    produce: Callable[[], Record]
    since: float = field(default_factory=time.monotonic)


class Spool:
    """Writes records in the background.

    Args:
        writer: where records go; called from all threads.
        threads: number of writer threads (daemons: a stuck disk cannot keep a process alive).
        max_bytes: most bytes submitted and not yet written; one larger record is let through alone.
        on_thread_start: runs first in each thread.
        on_room: runs in a writer thread whenever a record has left the queue.
    """

    def __init__(
        self,
        writer: Writer,
        *,
        threads: int,
        max_bytes: int,
        on_thread_start: Callable[[], None] | None = None,
        on_room: Callable[[], None] | None = None,
    ) -> None:
        self._writer = writer
        self._max_bytes = max_bytes
        self._on_thread_start = on_thread_start
        self._on_room = on_room
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._open: dict[_Job, None] = {}  # in their order
        self._waiting_bytes = 0
        self._written, self._failed, self._num_bytes, self._lag_s = 0, 0, 0, 0.0
        self._markers: dict[str, str] = {}
        self._trouble: str | None = None
        self._threads = [
            threading.Thread(target=self._run, name=f"hidden-states-writer-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def trouble(self) -> str | None:
        """Why the store takes not even error markers at present; None while it does."""
        return self._trouble

    def state(self) -> SpoolState:
        """Counts and what waits, at one moment."""
        with self._changed:
            oldest = next(iter(self._open), None)
            return SpoolState(
                self._written,
                self._failed,
                self._num_bytes,
                self._lag_s,
                len(self._open),
                self._waiting_bytes,
                time.monotonic() - oldest.since if oldest else 0.0,
            )

    def has_room(self, num_bytes: int) -> bool:
        """Whether a record of that size may be submitted now."""
        with self._changed:
            return not self._open or self._waiting_bytes + num_bytes <= self._max_bytes

    def submit(self, key: str, num_bytes: int, produce: Callable[[], Record]) -> None:
        """Queue a record; `produce` runs in a writer thread and may wait there for a copy to end."""
        job = _Job(key, num_bytes, produce)
        with self._changed:
            self._open[job] = None
            self._waiting_bytes += num_bytes
        self._jobs.put(job)

    def fail(self, key: str, message: str) -> None:
        """Queue an error marker for a record that could not even be submitted."""

        def produce() -> Record:
            raise ConnectorError(message)

        self.submit(key, 0, produce)

    def close(self, timeout_s: float) -> list[str]:
        """Wait for what is queued, then publish errors for what is left; the keys of the latter."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._changed.wait_for(lambda: not self._open, timeout_s)
            late = sorted(job.key for job in self._open)
        for _ in self._threads:
            self._jobs.put(None)
        for key in late:
            self._mark(key, f"the engine stopped before the record was written (waited {timeout_s:g} s)")
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return late

    def _run(self) -> None:
        _guarded(self._on_thread_start)
        while True:
            try:
                job = self._jobs.get(timeout=_RETRY_MARKERS_S if self._markers else None)
            except queue.Empty:
                self._retry_markers()
                continue
            if job is None:
                return
            self._write(job)

    def _write(self, job: _Job) -> None:
        message: str | None = "the writer thread ended unexpectedly"
        try:
            try:
                message = self._put(job)
            finally:
                if message is not None:
                    self._mark(job.key, message)
        finally:
            with self._changed:
                del self._open[job]
                self._count(job, message is None)
                self._changed.notify_all()
            _guarded(self._on_room)

    def _put(self, job: _Job) -> str | None:
        """Why there is no record; None where there is one."""
        try:
            self._writer.put(job.key, job.produce())
        except ConnectorError as error:
            return error.what
        except Exception as error:  # of any client library: a reader waits for the marker, the engine for this thread
            log.exception("unexpected error of the store of hidden states key=%s", job.key)
            return f"{type(error).__name__}: {error}"
        return None

    def _count(self, done: _Job, written: bool) -> None:
        self._waiting_bytes -= done.num_bytes
        if written:
            self._written += 1
            self._num_bytes += done.num_bytes
            self._lag_s += time.monotonic() - done.since
        else:
            self._failed += 1

    def _mark(self, key: str, message: str) -> None:
        log.error("hidden states not written key=%s cause=%s", key, message)
        refusal = self._marker_refused(key, message)
        if refusal is not None:
            with self._changed:
                self._markers[key] = message
                self._trouble = f"{message}; {refusal}"

    def _marker_refused(self, key: str, message: str) -> str | None:
        """Why the store takes no error marker; None where it took it."""
        try:
            self._writer.fail(key, message)
        except ConnectorError as error:
            return str(error)
        except Exception as error:  # as in _put
            log.exception("unexpected error of the store of hidden states, asked for an error marker key=%s", key)
            return f"{type(error).__name__}: {error}"
        return None

    def _retry_markers(self) -> None:
        with self._changed:
            owed = dict(self._markers)
        for key, message in owed.items():
            if self._marker_refused(key, message) is not None:
                return
            with self._changed:
                self._markers.pop(key, None)
                if not self._markers:
                    self._trouble = None
                    log.info("the store of hidden states takes writes again")


def _guarded(hook: Callable[[], None] | None) -> None:
    if hook is not None:
        try:
            hook()
        except Exception:  # what is queued still wants its thread
            log.exception("unexpected error in a writer thread of hidden states")
