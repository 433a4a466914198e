"""Records from a running engine: one request a row, one record a request."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass

from hs_connectors.contract import Handle, Reader, Record
from hs_connectors.errors import CaptureFailed, ConnectorError, RecordError, RecordTimeout
from speculators_core.engine.client import Generation, GenerationRequest, RequestError
from speculators_core.engine.server import Engine
from speculators_core.errors import CaptureError, EngineError
from speculators_core.states.collect import Collector, Rows, content_of, ids_of
from speculators_core.states.config import CaptureConfig
from speculators_core.states.gates import check_record
from speculators_core.states.handshake import check_announcement, terms_of
from speculators_core.states.parity import ParityGate
from speculators_core.states.shards import StatesFacts
from speculators_core.types import ProgressCallback

logger = logging.getLogger(__name__)

RESUME = "run the same command again: it goes on after the last finished shard"
_HOPELESS = 8
"""Failures before the first success after which nothing more is tried."""
_READERS = 2
_READ_AHEAD = 8
_LOOK_S = 2.0
"""Between two looks whether the engine still lives while a record is awaited."""


class Tally:
    """Counts of one run."""

    def __init__(self) -> None:
        self.rows = self.tokens = self.retried = 0
        self.seconds = 0.0

    def add(self, record: Record) -> None:
        """Count one captured row."""
        self.rows += 1
        self.tokens += record.token_ids.shape[0]


def request_states(
    rows: Rows,
    collector: Collector,
    gate: ParityGate,
    engine: Engine,
    config: CaptureConfig,
    reader: Reader,
    progress: ProgressCallback | None,
) -> Tally:
    """Request every missing row of the engine, pass it through the gates, and hand it to the collector.

    Raises:
        CaptureError: a gate failed, rows failed in every try, or the engine died; finished shards are kept.
    """
    check_announcement(reader, terms_of(collector, config), engine)
    tally, left = Tally(), collector.missing()
    total = len(left)
    # Sampled rows first: a capture that is wrong ends with its first requests.
    sampled = set(gate.positions)
    left = [position for position in left if position in sampled] + [
        position for position in left if position not in sampled
    ]
    hopeless = max(_HOPELESS, config.concurrency)
    started = time.monotonic()
    for _ in range(config.retries + 1):
        failures: dict[int, str] = {}
        try:
            with closing(_attempt(rows, left, engine, reader, collector.facts, config)) as outcomes:
                for position, outcome in outcomes:
                    if isinstance(outcome, str):
                        failures[position] = outcome
                        if tally.rows == 0 and len(failures) >= min(hopeless, total):
                            raise CaptureError(f"none of the first {len(failures)} rows was captured: {outcome}")
                        continue
                    row = rows.row(position)
                    gate.offer(row.index, outcome.record.hidden_states, outcome.next_token)
                    collector.add(content_of(row, outcome.record.hidden_states))
                    tally.add(outcome.record)
                    if progress is not None:
                        progress(tally.rows, total)
        except EngineError as error:
            raise CaptureError(
                f"the engine failed after {tally.rows} of {total} rows: {error.what}",
                mend=f"{error.mend}; then {RESUME}" if error.mend else RESUME,
            ) from error
        left = sorted(failures)
        if not left:
            break
        tally.retried += len(left)
        logger.warning("%d rows failed, the first with: %s", len(left), failures[left[0]])
    else:
        numbers = ", ".join(str(rows.row(position).index) for position in left[:10])
        raise CaptureError(
            f"{len(left)} rows could not be captured in {config.retries + 1} tries (rows {numbers}): "
            f"{failures[left[0]]}",
            mend=f"mend the cause or leave these rows out of the data; then {RESUME}",
        )
    tally.seconds = time.monotonic() - started
    return tally


@dataclass(frozen=True)
class _Captured:
    """A record that passed its gates, and the token that the engine generated after it."""

    record: Record
    next_token: int | None


def _attempt(
    rows: Rows, positions: Sequence[int], engine: Engine, reader: Reader, facts: StatesFacts, config: CaptureConfig
) -> Generator[tuple[int, _Captured | str]]:
    """One try at every position: (position, what was captured, or why it was not).

    Records are read and checked by a few threads, a few records ahead: that is most of our own work, and it must not
    hold up an engine that is faster than one core.
    """

    def take(generation: Generation) -> _Captured | str:
        row = rows.row(int(generation.id))
        try:
            record = fetch_record(generation, reader, engine.check, config.record_timeout_s)
        except (CaptureFailed, RecordTimeout, RecordError) as error:
            return error.what
        except ConnectorError as error:
            raise CaptureError(f"records cannot be read: {error.what}", mend=error.mend or RESUME) from error
        check_record(record, row.index, ids_of(row), facts)
        return _Captured(record, generation.token_ids[0] if generation.token_ids else None)

    def refusals() -> Iterator[tuple[int, str]]:
        while refused:
            error = refused.pop()
            if not error.request_id:
                raise error
            yield int(error.request_id), error.what

    refused: list[RequestError] = []
    reading: deque[tuple[int, Future[_Captured | str]]] = deque()
    requests = (
        GenerationRequest(id=str(position), prompt_token_ids=tuple(ids_of(rows.row(position)).tolist()), max_tokens=1)
        for position in positions
    )
    death: EngineError | None = None
    with engine.client() as client, ThreadPoolExecutor(_READERS, thread_name_prefix="records") as pool:
        try:
            for generation in client.generate(requests, concurrency=config.concurrency, on_error=refused.append):
                yield from refusals()
                reading.append((int(generation.id), pool.submit(take, generation)))
                if len(reading) > _READ_AHEAD:
                    position, future = reading.popleft()
                    yield position, future.result()
        except EngineError as error:
            death = error  # what it answered before is whole, and need not be captured again
        for position, future in reading:
            try:
                yield position, future.result()
            except EngineError as error:
                death = death or error
        if death is not None:
            raise death
        yield from refusals()


def fetch_record(generation: Generation, reader: Reader, check: Callable[[], None], timeout_s: float) -> Record:
    """The record of a finished request; deleted from the backend once it is in memory.

    Args:
        check: raises EngineError where the engine is gone; asked now and then while the record is awaited.

    Raises:
        CaptureFailed, RecordTimeout, RecordError: there is no record, or none that is whole.
        CaptureError: the engine was not started for a capture.
    """
    parameters = generation.kv_transfer_params
    if isinstance(parameters, Mapping) and "error" in parameters:
        raise CaptureFailed(str(parameters["error"]))
    if not isinstance(parameters, Mapping) or "handle" not in parameters:
        raise CaptureError(
            "the engine's answer names no record: it was not started for a capture",
            mend="let `capture` start the engine, or start it with the settings of `capture_server`",
        )
    handle = Handle.from_json(parameters["handle"])
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            record = reader.get(handle, min(_LOOK_S, timeout_s))
            break
        except RecordTimeout:
            check()  # a dead engine writes nothing any more: say so now
            if time.monotonic() > deadline:
                raise
        except (CaptureFailed, RecordError):
            reader.delete(handle)
            raise
    reader.delete(handle)
    return record
