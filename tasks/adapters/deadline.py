"""A limit for a whole exchange with a server.

The time-outs of HTTP libraries are for each read: a server that sends one byte now and then renews them for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")


def within(limit_s: float, call: Callable[[], T]) -> T:
    """The call's result, or what it raised.

    Raises:
        TimeoutError: it took longer; it goes on in a thread, which ends with this process.
    """
    outcome: Future[T] = Future()

    def work() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # noqa: BLE001 — raised where the result is asked for
            outcome.set_exception(error)

    threading.Thread(target=work, name="within", daemon=True).start()
    if wait([outcome], timeout=limit_s).not_done:
        raise TimeoutError(f"no whole answer within {limit_s:.0f} s")
    return outcome.result()
