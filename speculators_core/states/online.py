"""States that are asked of engines while training runs, in the order in which training will read them.

The trainer sees a set like any other. What it says it will read next (`expecting`) is asked for ahead, as far as the
window goes: a slow trainer fills the window, and the engines rest; slow engines empty it, and the trainer waits. The
order is the trainer's, whatever order answers arrive in.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from hs_connectors.errors import ConnectorError
from speculators_core.data.rows import RowSet
from speculators_core.errors import CaptureError
from speculators_core.states.collect import Row, Rows, each, ids_of
from speculators_core.states.config import OnlineRequest
from speculators_core.states.kept import KeptRows
from speculators_core.states.pool import EnginePool
from speculators_core.states.replies import (
    REPLIES,
    WithoutLastToken,
    beginning,
    match_handles,
    read_regenerated,
    records_reader,
)
from speculators_core.states.shards import StatesFacts


@dataclass(frozen=True)
class OnlineRow:
    """A row whose states arrive when they are looked at. Otherwise as a set's: see `sets.StateRow`."""

    index: int
    split: str
    input_ids: Tensor
    loss_mask: Tensor
    await_states: Callable[[], Tensor]

    @property
    def hidden_states(self) -> Tensor:
        """[T, K, H] in the captured dtype; waits for them. CaptureError where none will come."""
        return self.await_states()


class OnlineStates:
    """A data set's rows with states from running engines; closed when training is over.

    Memory: the states of `window_tokens` tokens (and of one row, where that is longer).
    """

    def __init__(self, rows: Rows, request: OnlineRequest) -> None:
        """Raises EngineError where nobody keeps engines for this run."""
        self._rows = rows
        found = [(ids_of(row).shape[0], str(row.split)) for row in each(rows)]
        self.lengths: Sequence[int] = [length for length, _ in found]
        self.splits: Sequence[str] = [split for _, split in found]
        self.facts = facts_of(request)
        self.layer_ids = self.facts.layer_ids
        self._window = max(1, request.states.window_tokens // request.ranks)
        quota = request.states.cache_gib * 2**30
        self._kept = KeptRows(Path(request.cache), self.facts, self.lengths, self.splits, quota)
        self._pool = EnginePool(request, self.facts)
        threads = max(1, request.capture.concurrency * len(request.states.engines) // request.ranks)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="states")
        self._readings: list[_Reading] = []

    @classmethod
    def open(cls, request: OnlineRequest) -> OnlineStates:
        """The rows of the request's data set. DataError where it is torn; EngineError as above."""
        rows = RowSet.open(Path(request.dataset))
        return cls(WithoutLastToken(rows) if request.without_last else rows, request)

    def row(self, position: int) -> OnlineRow:
        """The row at a position; its states are waited for when they are looked at."""
        row = self._rows.row(position)
        mask = torch.as_tensor(row.loss_mask).bool()
        return OnlineRow(row.index, str(row.split), ids_of(row), mask, partial(self._await, position))

    @contextmanager
    def expecting(self, positions: Iterable[int]) -> Iterator[None]:
        """Ask for these rows ahead while the body reads each once, in this order."""
        reading = _Reading(positions, self.lengths, self._window, self._submit)
        self._readings.append(reading)
        try:
            yield
        finally:
            self._readings.remove(reading)
            reading.close()

    def close(self) -> None:
        """End all requests."""
        self._pool.stop()
        self._threads.shutdown(wait=True, cancel_futures=True)  # what is on its way leaves no record behind

    def _await(self, position: int) -> Tensor:
        for reading in tuple(self._readings):
            if (arriving := reading.take(position)) is not None:
                return arriving.result()
        return self._load(position)

    def _submit(self, position: int) -> Future[Tensor]:
        return self._threads.submit(self._load, position)

    def _load(self, position: int) -> Tensor:
        row: Row = self._rows.row(position)
        states = self._kept.get(position, row)
        if states is None:
            states = self._pool.states_of(row)
            self._kept.put(position, row, states)
        return states


def keep_answers(rows: Rows, records: Path, request: OnlineRequest) -> int:
    """Keep the states that the requests which made the replies left, as far as rows are kept; how many.

    What else they left is removed, and what is missing is asked of an engine when training reads it.
    """
    if not (records / REPLIES).is_file():
        return 0
    facts, inputs, number = facts_of(request), WithoutLastToken(rows), 0
    found = list(each(inputs))
    lengths, splits = [ids_of(row).shape[0] for row in found], [str(row.split) for row in found]
    kept = KeptRows(Path(request.cache), facts, lengths, splits, request.states.cache_gib * 2**30)
    handles, reader = match_handles(rows, read_regenerated(records / REPLIES)), records_reader(records, request.capture)
    for position in sorted(kept.positions):
        row = inputs.row(position)
        try:
            record = reader.get(handles[row.index], 0)
            kept.put(position, row, beginning(record, row, facts).hidden_states)
            number += 1
        except (KeyError, ConnectorError, CaptureError):
            continue  # asked for like any other
    shutil.rmtree(records)
    return number


class _Reading:
    """Rows that one reader reads in order: those that were asked for, and what of the window is left."""

    def __init__(
        self,
        positions: Iterable[int],
        lengths: Sequence[int],
        window: int,
        submit: Callable[[int], Future[Tensor]],
    ) -> None:
        self._order, self._lengths, self._left, self._submit = iter(positions), lengths, window, submit
        self._lock = threading.Lock()
        self._asked: dict[int, Future[Tensor]] = {}
        self._next = next(self._order, None)
        self._fill()

    def take(self, position: int) -> Future[Tensor] | None:
        """What was asked for at this position, to be waited for; None where it was not."""
        with self._lock:
            arriving = self._asked.pop(position, None)
            if arriving is not None:
                self._left += self._lengths[position]
        self._fill()
        return arriving

    def close(self) -> None:
        """Ask for nothing more; what is on its way is dropped when it arrives."""
        with self._lock:
            self._next = None
            for arriving in self._asked.values():
                arriving.cancel()
            self._asked.clear()

    def _fill(self) -> None:
        with self._lock:
            while self._next is not None and (self._lengths[self._next] <= self._left or not self._asked):
                self._asked[self._next] = self._submit(self._next)
                self._left -= self._lengths[self._next]
                self._next = next(self._order, None)


def facts_of(request: OnlineRequest) -> StatesFacts:
    """What every record is checked for."""
    terms = request.terms
    return StatesFacts(
        layer_ids=terms.layer_ids,
        hidden_size=request.hidden_size,
        dtype=terms.states_dtype,
        verifier_fingerprint=terms.verifier_fingerprint,
        source="engine",
    )
