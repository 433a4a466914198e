"""Engines that live as long as a training that streams states from them.

Each engine of ours has a thread that starts it, enters its address in the book, watches it, and starts it again on
another port when it dies. Training finds the new address by itself. Servers that somebody else runs are only entered.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from speculators_core.engine.remote import RecordStore
from speculators_core.engine.runtime import Runtime
from speculators_core.engine.server import Engine, ServerSpec, serve
from speculators_core.errors import EngineError, cause_of
from speculators_core.states.book import AddressBook

log = logging.getLogger(__name__)

_WATCH_S = 0.5


@dataclass(frozen=True)
class Station:
    """One engine: how it is started (also by somebody else, where the runtime is a URL), and where its records go."""

    runtime: Runtime
    store: RecordStore
    spec: ServerSpec


@contextmanager
def keep_engines(
    stations: Sequence[Station],
    book: AddressBook,
    *,
    home: Path,
    check: Callable[[Engine], None],
    restarts: int,
) -> Iterator[None]:
    """Keep these engines for the length of a `with` block that begins when all of them answer; none outlives it.

    Args:
        check: called with each engine before it is entered, also after a restart.
        restarts: how often each is started again.

    Raises:
        DraftsmithError: one does not start, or fails the check, before the body began.
    """
    book.open(len(stations))
    keepers = [_Keeper(str(number), station, book, home, check, restarts) for number, station in enumerate(stations)]
    try:
        for keeper in keepers:
            keeper.start()
        for keeper in keepers:
            keeper.await_ready()
        yield
    finally:
        for keeper in keepers:
            keeper.stopped.set()
        for keeper in keepers:
            keeper.join()


class _Keeper(threading.Thread):
    """Keeps one engine."""

    def __init__(
        self,
        seat: str,
        station: Station,
        book: AddressBook,
        home: Path,
        check: Callable[[Engine], None],
        restarts: int,
    ) -> None:
        super().__init__(name=f"keeper-{seat}", daemon=True)
        self._seat, self._station, self._book, self._home = seat, station, book, home
        self._check, self._restarts = check, restarts
        self.stopped = threading.Event()
        self._settled = threading.Event()
        self._error: BaseException | None = None

    def await_ready(self) -> None:
        """Return when the engine answers; raise what kept it from that."""
        self._settled.wait()
        if self._error is not None:
            raise self._error

    def run(self) -> None:
        """Start, watch, start again."""
        for left in range(self._restarts, -1, -1):
            try:
                self._serve()
                return
            except EngineError as error:
                if self.stopped.is_set():
                    return
                if not self._settled.is_set() or not left:
                    self._give_up(error)
                    return
                log.warning("engine %s is started again: %s", self._seat, error.what)
                self._book.strike(self._seat)
            except BaseException as error:  # noqa: BLE001 — handed to whoever waits, or told in the book
                self._give_up(error)
                return

    def _serve(self) -> None:
        """Keep one process until it dies (EngineError) or we stop."""
        station = self._station
        with serve(station.runtime, station.spec, home=self._home, while_starting=self._require_need) as engine:
            self._check(engine)
            server = station.runtime
            if server.url is None:
                server = Runtime(name=f"{server.name}-{self._seat}", url=engine.base_url, store=station.store)
            self._book.enter(self._seat, server)
            self._settled.set()
            while not self.stopped.wait(_WATCH_S):
                engine.check()

    def _require_need(self) -> None:
        if self.stopped.is_set():
            raise EngineError("the start was given up: nobody needs the engine any more")

    def _give_up(self, error: BaseException) -> None:
        self._error = error
        if self._settled.is_set():
            cause = cause_of(error)
            log.error("engine %s is lost: %s", self._seat, cause)
            self._book.strike(self._seat, cause)
        self._settled.set()
