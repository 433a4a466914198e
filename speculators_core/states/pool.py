"""Engines that are asked for states: the least loaded first; one that fails is set aside and tried again.

Errors are told apart by whom they concern. A row that an engine refuses or whose record is torn is asked for again, a
few times. An engine that is away costs only time: its rows go to others, or wait for it. A record or an engine of
other terms ends the run: whatever came before it was checked, and nothing after it is used.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from hs_connectors.contract import Reader
from hs_connectors.errors import CaptureFailed, ConnectorError, RecordError, RecordTimeout
from speculators_core.engine.client import EngineClient, GenerationRequest, RequestError
from speculators_core.engine.runtime import Runtime
from speculators_core.errors import CaptureError, EngineError
from speculators_core.states.book import AddressBook
from speculators_core.states.collect import Row, ids_of
from speculators_core.states.config import OnlineRequest
from speculators_core.states.gates import check_record
from speculators_core.states.handshake import shake_hands
from speculators_core.states.shards import StatesFacts
from speculators_core.states.source import fetch_record
from speculators_core.states.sweep import sweep

log = logging.getLogger(__name__)

_AGAIN = "run the same command again: it goes on from its last checkpoint"
_LOOK_S = 0.5
"""Between two looks into the address book: an engine that was started again is there under another address."""
_ASIDE_S, _LONGEST_ASIDE_S = 0.5, 15.0
_HOPELESS = 8
"""Requests that fail one after the other before the run is stopped; more, where more are in flight at once."""


@dataclass
class _Engine:
    """A server, our connection to it, and how it fares."""

    server: Runtime
    reader: Reader
    client: EngineClient = field(init=False)
    in_flight: int = 0
    failures: int = 0
    aside_until: float = 0.0
    greeted: bool = False
    greeting: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        """Opens the connection."""
        self.client = EngineClient(str(self.server.url), check=self.check, api_key=self.server.api_key())

    def check(self) -> None:
        """EngineError where the server is not well: it then owes nothing any more."""
        if not self.client.health():
            raise EngineError(f"the server at {self.server.url} does not answer, or is not well")


class EnginePool:
    """Asks for one row at a time; usable from many threads. Raises the same CaptureError in all of them once broken."""

    def __init__(self, request: OnlineRequest, facts: StatesFacts) -> None:
        """Reads the address book.

        Raises:
            EngineError: nobody keeps engines for this run.
        """
        self._request, self._facts = request, facts
        self._book = AddressBook(Path(request.book))
        self._changed = threading.Condition()
        self._engines: dict[str, _Engine] = {}
        self._broken: CaptureError | None = None
        self._cause = "none was ever there"
        self._silent_since: float | None = None
        self._failed_rows = 0
        self._looked_at = 0.0
        self._look()

    def states_of(self, row: Row) -> Tensor:
        """The states of one row, checked; its record is deleted from the store.

        Returns:
            [T, K, H] in the captured dtype.

        Raises:
            CaptureError: the row failed in every try, rows fail one after the other, an engine captures something else,
                or no engine answered for `patience_s`.
        """
        failures: list[str] = []
        while True:
            with self._leased() as engine:
                try:
                    states = self._ask(engine, row)
                except RequestError as error:
                    failures.append(error.what)
                except EngineError as error:
                    self._set_aside(engine, error)
                    continue
                except (CaptureFailed, RecordTimeout, RecordError) as error:
                    failures.append(error.what)
                except ConnectorError as error:
                    raise self._break(CaptureError(f"records cannot be read: {error.what}", mend=error.mend)) from error
                except CaptureError as error:
                    raise self._break(error) from error
                else:
                    self._went_well(engine)
                    return states
            self._count_failure(row, failures)

    def stop(self) -> None:
        """Ask for nothing more: whoever waits for an engine gets a CaptureError. What is asked for already ends."""
        self._break(CaptureError("the stream of states was closed"))

    def _ask(self, engine: _Engine, row: Row) -> Tensor:
        self._greet(engine)
        ids = ids_of(row)
        asked = GenerationRequest(id=str(row.index), prompt_token_ids=tuple(ids.tolist()), max_tokens=1)
        generation = engine.client.ask(asked)
        record = fetch_record(generation, engine.reader, engine.check, self._request.capture.record_timeout_s)
        check_record(record, row.index, ids, self._facts)
        return record.hidden_states

    def _greet(self, engine: _Engine) -> None:
        """The handshake before an engine's first record, and the sweep of what dead readers left in its store."""
        with engine.greeting:
            if engine.greeted:
                return
            shake_hands(engine.server, self._request.terms, self._request.command)
            assert engine.server.store is not None
            if removed := sweep(engine.server.store, self._request.states.lease_s):
                log.warning("removed %d records of dead readers from %s", removed, engine.server.store.describe())
            engine.greeted = True

    # ------------------------------------------------------------------------------------------ whom to ask

    @contextmanager
    def _leased(self) -> Iterator[_Engine]:
        engine = self._choose()
        try:
            yield engine
        finally:
            with self._changed:
                engine.in_flight -= 1
                self._changed.notify_all()

    def _choose(self) -> _Engine:
        with self._changed:
            while True:
                now = time.monotonic()
                if self._broken is None and now - self._looked_at >= _LOOK_S:
                    self._look()
                if self._broken is not None:
                    raise self._broken
                ready = [engine for engine in self._engines.values() if engine.aside_until <= now]
                if ready:
                    chosen = min(ready, key=lambda engine: engine.in_flight)
                    chosen.in_flight += 1
                    return chosen
                self._silent_since = self._silent_since or now
                if now - self._silent_since > self._request.states.patience_s:
                    self._broken = CaptureError(
                        f"no engine answered for {self._request.states.patience_s:g} s: {self._cause}",
                        mend=f"see the engines' logs; then {_AGAIN}",
                    )
                    continue
                self._changed.wait(_LOOK_S)

    def _look(self) -> None:
        """Take over what the address book says by now; engines that it no longer lists are forgotten."""
        content = self._book.read()
        self._looked_at = time.monotonic()
        for seat in [seat for seat, known in self._engines.items() if content.engines.get(seat) != known.server]:
            del self._engines[seat]  # its requests end by themselves
        for seat, server in content.engines.items():
            if seat not in self._engines:
                assert server.url is not None and server.store is not None
                self._engines[seat] = _Engine(server, server.store.reader())
                log.info("engine %s is at %s", seat, server.url)
        if content.starting:
            self._silent_since = None  # who starts it has a limit of its own
        if content.hopeless is not None and not self._engines:
            self._broken = CaptureError(f"no engine is left: {content.hopeless}")

    # ------------------------------------------------------------------------------------------ how it went

    def _went_well(self, engine: _Engine) -> None:
        with self._changed:
            self._silent_since = None
            self._failed_rows = engine.failures = 0

    def _set_aside(self, engine: _Engine, error: EngineError) -> None:
        with self._changed:
            self._look()
            if engine.aside_until > time.monotonic():
                return  # by another of its requests
            engine.failures += 1
            pause = min(_ASIDE_S * 2 ** (engine.failures - 1), _LONGEST_ASIDE_S)
            engine.aside_until = time.monotonic() + pause
            engine.greeted = False  # whoever answers there next may be another
            self._cause = error.what
        log.warning("engine at %s is set aside for %.1f s: %s", engine.server.url, pause, error.what)

    def _count_failure(self, row: Row, failures: list[str]) -> None:
        """Another try, or the end of the run."""
        with self._changed:
            self._failed_rows += 1
            in_a_row, tries = self._failed_rows, self._request.capture.retries + 1
        log.warning("row %d failed: %s", row.index, failures[-1])
        if in_a_row > max(_HOPELESS, self._request.capture.concurrency):
            what = f"the last {in_a_row} requests failed, that of row {row.index} with: {failures[-1]}"
        elif len(failures) >= tries:
            what = f"row {row.index} could not be captured in {tries} tries: {failures[-1]}"
        else:
            return
        raise self._break(CaptureError(what, mend=f"mend the cause or leave the row out of the data; then {_AGAIN}"))

    def _break(self, error: CaptureError) -> CaptureError:
        """Stop all threads with this error; the first one counts."""
        with self._changed:
            self._broken = self._broken or error
            self._changed.notify_all()
            return self._broken
