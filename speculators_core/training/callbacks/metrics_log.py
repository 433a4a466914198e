"""metrics.jsonl: one JSON line for each logged step and each validation, flushed, for whoever follows the run."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speculators_core.store.files import storage_errors, write_atomic
from speculators_core.training.callbacks.base import Callback
from speculators_core.types import Counted

if TYPE_CHECKING:
    from speculators_core.training.trainer import StepReport, Trainer


class MetricsLog(Callback):
    """Writes `kind: "train"` lines itself and lends `write` to others for theirs. Files only on the main rank.

    Fields of a train line: step, total_steps, epoch, tokens (so far, padding excluded), tokens_per_s (since the last
    line), wait_share (of that time: for batches, on the main rank), loss (mean over the steps since the last line), lr,
    grad_norm, eta_s, metrics {name: mean}.
    """

    name = "metrics_log"

    def __init__(self, path: Path, every_steps: int) -> None:
        self.path = path
        self.every_steps = every_steps
        self._window: dict[str, Counted] = {}
        self._waited = 0.0
        self._window_start = (0.0, 0, 0)

    def on_start(self, trainer: Trainer) -> None:
        """Forget lines of steps that a kill took back."""
        self._window_start = (time.monotonic(), trainer.position.step, trainer.position.tokens)
        reached = trainer.position.step
        self.keep(trainer, lambda line: line["step"] <= reached)

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        """Pool the step; write a line when due."""
        self._waited += report.waited_s
        for name, value in report.metrics.items():
            self._window[name] = self._window.get(name, Counted(0.0, 0.0)) + value
        if report.step % self.every_steps and report.step != trainer.total_steps:
            return
        pooled = trainer.world.pool(self._window)
        now = time.monotonic()
        start, first_step, first_tokens = self._window_start
        seconds = max(now - start, 1e-9)
        steps = trainer.position.step - first_step
        loss = pooled.pop("loss").mean
        self.write(
            trainer,
            {
                "kind": "train",
                "step": report.step,
                "total_steps": trainer.total_steps,
                "epoch": trainer.position.epoch,
                "tokens": trainer.position.tokens,
                "tokens_per_s": round((trainer.position.tokens - first_tokens) / seconds, 1),
                "wait_share": round(self._waited / seconds, 4),
                "loss": loss,
                "lr": report.learning_rate,
                "grad_norm": report.grad_norm,
                "eta_s": round((trainer.total_steps - report.step) * seconds / max(steps, 1), 1),
                "metrics": {name: value.mean for name, value in pooled.items() if value.count},
            },
        )
        self._window, self._waited = {}, 0.0
        self._window_start = (time.monotonic(), trainer.position.step, trainer.position.tokens)

    def keep(self, trainer: Trainer, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Forget the other lines, on the main rank. StoreError: the disk is full."""
        if trainer.world.is_main:
            text = "".join(json.dumps(line) + "\n" for line in read_metrics(self.path) if wanted(line))
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self.path, lambda part: part.write_text(text))

    def write(self, trainer: Trainer, line: dict[str, Any]) -> None:
        """Append one line on the main rank, with the time added. StoreError: the disk is full."""
        if trainer.world.is_main:
            with storage_errors(self.path, "writing metrics"), self.path.open("a") as file:
                file.write(json.dumps({**line, "time": round(time.time(), 3)}) + "\n")
                file.flush()
                os.fsync(file.fileno())


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a metrics file; an unfinished last line (a kill) is left out; a missing file is empty."""
    lines: list[dict[str, Any]] = []
    if path.is_file():
        for text in path.read_text().split("\n")[:-1]:
            try:
                lines.append(json.loads(text))
            except ValueError:
                continue  # torn by a kill in mid-write, then appended to
    return lines
