"""A trainer's metrics.jsonl, followed into an MLflow run while it is being written.

The trainer never sees MLflow: it appends a JSON object a line, flushed, with `step`, usually `time` (Unix seconds), and
numbers, nested or in lists; `kind` (train, validation) becomes the names' prefix. A point is identified by name, step
and the line's own time, so sending it twice stores it once; file and byte offset are kept as a tag, so that a follower
that starts again does not even send it twice.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlflow.entities import Metric

from speculators_core.errors import RegistryError
from tasks.adapters.tracking import StageRun, metric_name, mlflow_errors

log = logging.getLogger(__name__)

OFFSET_TAG = "draftsmith.metrics_offset"
_READ_BYTES = 1 << 20
_NOT_METRICS = frozenset({"step", "time", "timestamp"})


class Follower:
    """Sends the finished lines of a file to a run; keeps where it stands in the run itself."""

    def __init__(self, path: Path, run: StageRun) -> None:
        """Takes up at the run's own offset."""
        self._path = path
        self._run = run
        with mlflow_errors("read the run", run.uri):
            info = run.client.get_run(run.run_id)
        inode, _, offset = info.data.tags.get(OFFSET_TAG, "0:0").partition(":")
        self._inode, self._offset = int(inode), int(offset)
        self._fallback_time = int(info.info.start_time)
        self.points = 0
        self.skipped = 0

    def pump(self) -> bool:
        """Send what is new, at most about 1 MiB of lines; True when there may be more.

        The torn line at the end of a file that is being written waits for its newline. A file that was replaced (a
        trainer that resumes drops the steps it will repeat) is read from its start.

        Raises:
            RegistryError: MLflow is away; nothing is lost, the next call sends it again.
        """
        try:
            with self._path.open("rb") as stream:
                status = os.fstat(stream.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._inode, self._offset = status.st_ino, 0
                stream.seek(self._offset)
                block = stream.read(_READ_BYTES)
        except FileNotFoundError:
            return False
        finished = block.rfind(b"\n") + 1
        if not finished:
            return False
        # a trainer that resumed from a checkpoint repeats steps: of those in one block the last line counts
        latest: dict[tuple[str, int], Metric] = {}
        for line in block[:finished].splitlines():
            for point in self._points(line):
                latest[point.key, point.step] = point
        self._run.metric_points(list(latest.values()))
        self.points += len(latest)
        self._offset += finished
        self._run.tags({OFFSET_TAG: f"{self._inode}:{self._offset}"})
        return len(block) == _READ_BYTES

    def _points(self, line: bytes) -> Iterator[Metric]:
        if not line.strip():
            return
        try:
            record = json.loads(line)
            step = int(record["step"])
        except (ValueError, KeyError, TypeError):
            self.skipped += 1
            log.warning("%s holds a line that is not a metrics record; it is skipped", self._path)
            return
        stamp = record.get("time", record.get("timestamp"))
        milliseconds = int(float(stamp) * 1000) if isinstance(stamp, (int, float)) else self._fallback_time
        kind = record.get("kind")
        for name, value in _numbers(record):
            yield Metric(metric_name(f"{kind}/{name}" if kind else name), value, milliseconds, step)


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Leaves that are numbers, named by their path: `validation/per_position/0`."""
    if isinstance(value, bool):
        return
    if isinstance(value, (int, float)):
        yield name, float(value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if name or key not in _NOT_METRICS:
                yield from _numbers(item, f"{name}/{key}" if name else str(key))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for position, item in enumerate(value):
            yield from _numbers(item, f"{name}/{position}")


@contextmanager
def follow_metrics(path: Path, run: StageRun, *, interval_s: float = 1.0) -> Iterator[Follower]:
    """Follow a file in a thread while the body runs, and send the rest at its end.

    An MLflow that is away never stops the training: the follower warns once, tries again at each interval, and what
    could not be sent stays in the file.
    """
    follower = Follower(path, run)
    stop = threading.Event()

    def work() -> None:
        warned = False
        while True:
            ending = stop.is_set()
            try:
                while follower.pump():
                    pass
                warned = False
            except RegistryError as error:
                if not warned or ending:
                    log.warning("metrics wait in %s: %s", path, error.what)
                warned = True
            if ending:
                return
            stop.wait(interval_s)

    thread = threading.Thread(target=work, name="follow-metrics", daemon=True)
    thread.start()
    try:
        yield follower
    finally:
        stop.set()
        thread.join()
