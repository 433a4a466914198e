"""SIGTERM and SIGINT end serving wherever it stands."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from speculators_core.errors import Interrupted


class Signalled(BaseException):
    """A signal came. No Exception: nobody may take it for a failure of what was under way (MLflow wraps every one)."""


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """SIGTERM and SIGINT raise Signalled within the block; what leaves it is Interrupted."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise Signalled(signal.Signals(signum).name)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    except Signalled as signalled:
        raise Interrupted(str(signalled)) from signalled
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
