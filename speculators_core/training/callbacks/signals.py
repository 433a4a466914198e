"""SIGTERM and SIGINT become a request to save and stop; one that comes again later acts at once."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import TYPE_CHECKING, Any

from speculators_core.training.callbacks.base import Callback

if TYPE_CHECKING:
    from speculators_core.training.trainer import Trainer

HANDLED = (signal.SIGTERM, signal.SIGINT)
ECHO_SECONDS = 3.0
"""A launcher passes on a signal that the whole process group got: the same request, not a second one."""


class Signals(Callback):
    """Installs handlers while the loop runs, and puts the former ones back. Inert outside the main thread."""

    name = "signals"

    def __init__(self) -> None:
        self._former: dict[signal.Signals, Any] = {}

    def on_start(self, trainer: Trainer) -> None:
        """Install the handlers."""
        if threading.current_thread() is not threading.main_thread():
            return

        first = 0.0

        def handle(number: int, frame: FrameType | None) -> None:
            nonlocal first
            if not first:
                first = time.monotonic()
                trainer.interrupt(signal.Signals(number).name)
            elif time.monotonic() - first > ECHO_SECONDS:
                self._restore()
                signal.raise_signal(number)

        for number in HANDLED:
            self._former[number] = signal.signal(number, handle)

    def on_finish(self, trainer: Trainer) -> None:
        """Put the former handlers back."""
        self._restore()

    def on_error(self, trainer: Trainer, error: BaseException) -> None:
        """Put the former handlers back."""
        self._restore()

    def _restore(self) -> None:
        for number, former in self._former.items():
            signal.signal(number, former)
        self._former.clear()
