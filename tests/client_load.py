"""Steady load on a server: clients that ask without a pause, one request after the other, and write down what fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx

Ask = Callable[[httpx.Client], str]
"""One request; returns what the answer was, raises where there was none."""


@dataclass
class Load:
    """What the clients saw so far."""

    answers: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)

    def await_answers(self, more: int, timeout_s: float) -> None:
        """Return when so many further requests were answered."""
        wanted, deadline = len(self.answers) + more, time.monotonic() + timeout_s
        while len(self.answers) < wanted:
            assert time.monotonic() < deadline, f"{len(self.answers)} of {wanted} answers; {self.failures[:3]}"
            time.sleep(0.05)

    def work(self, address: str, ask: Ask) -> None:
        with httpx.Client(base_url=address, timeout=300, trust_env=False) as http:
            while not self._ended.is_set():
                try:
                    self.answers.append(ask(http))
                except (httpx.HTTPError, AssertionError, ValueError) as error:
                    self.failures.append(f"{type(error).__name__}: {error}")


@contextmanager
def steady_load(address: str, ask: Ask, *, clients: int) -> Iterator[Load]:
    """Clients at work as long as the block lasts; the requests in flight are finished at its end."""
    load = Load()
    threads = [threading.Thread(target=load.work, args=(address, ask), daemon=True) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield load
    finally:
        load._ended.set()
        for thread in threads:
            thread.join()
