"""Progress for people: a bar on a terminal, a quiet line now and then elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from typing import TYPE_CHECKING

from speculators_core.training.callbacks.base import Callback

if TYPE_CHECKING:
    from rich.progress import Progress

    from speculators_core.training.trainer import StepReport, Trainer

log = logging.getLogger(__name__)


class ProgressReport(Callback):
    """Steps, loss, tokens/s and time left, on the main rank only."""

    name = "progress"

    def __init__(self, *, every_seconds: float = 15.0) -> None:
        self.every_seconds = every_seconds
        self._bar: Progress | None = None
        self._start = self._said = 0.0
        self._first_step = self._first_tokens = 0

    def on_start(self, trainer: Trainer) -> None:
        """Start the clock, and the bar on a terminal."""
        self._start = self._said = time.monotonic()
        self._first_step, self._first_tokens = trainer.position.step, trainer.position.tokens
        if trainer.world.is_main and sys.stderr.isatty():
            self._bar = _bar()
            self._bar.add_task("training", total=trainer.total_steps, completed=trainer.position.step, told="")
            self._bar.start()

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        """Move the bar, or say a line when it is time."""
        if not trainer.world.is_main:
            return
        now = time.monotonic()
        seconds = max(now - self._start, 1e-9)
        rate = (trainer.position.tokens - self._first_tokens) / seconds
        loss = report.metrics["loss"].sum  # this rank's share; the file holds the pooled one
        if self._bar is not None:
            told = f"loss {loss:.3f} · {rate:,.0f} tokens/s"
            self._bar.update(self._bar.task_ids[0], completed=report.step, told=told)
        elif now - self._said >= self.every_seconds or report.step == trainer.total_steps:
            self._said = now
            left = (trainer.total_steps - report.step) * seconds / max(report.step - self._first_step, 1)
            log.info(
                "step=%d/%d loss=%.4f tokens_per_s=%.0f left_s=%.0f", report.step, trainer.total_steps, loss, rate, left
            )

    def on_finish(self, trainer: Trainer) -> None:
        """Take the bar down."""
        self._stop()

    def on_error(self, trainer: Trainer, error: BaseException) -> None:
        """Take the bar down."""
        self._stop()

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _bar() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[told]}"))
    return Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True))
