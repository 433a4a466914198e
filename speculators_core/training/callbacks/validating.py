"""Validates when due, keeps the best weights in `best/`, and stops a run that no longer improves."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speculators_core.training import checkpoints
from speculators_core.training.callbacks.base import Callback
from speculators_core.training.callbacks.metrics_log import MetricsLog
from speculators_core.training.config import ValidationConfig
from speculators_core.training.validation import ValidationReport, Validator
from speculators_core.training.weights import trained_tensors

if TYPE_CHECKING:
    from speculators_core.training.trainer import StepReport, Trainer

log = logging.getLogger(__name__)


class Validating(Callback):
    """Puts the weights with the best `config.best_metric` into `best` (a checkpoint of weights alone)."""

    name = "validating"

    def __init__(self, validator: Validator, config: ValidationConfig, best: Path, metrics_log: MetricsLog) -> None:
        self.validator = validator
        self.config = config
        self.best = best
        self.metrics_log = metrics_log
        self.best_step: int | None = None
        self.best_report: ValidationReport | None = None
        self.last_step: int | None = None
        self._since_best = 0

    def on_start(self, trainer: Trainer) -> None:
        """Finish what a kill interrupted, be it a validation; a run that had stopped early stays stopped."""
        if trainer.world.is_main:
            checkpoints.mend_replace(self.best)
        known = self.last_step or 0
        self.metrics_log.keep(trainer, lambda line: line["kind"] != "validation" or line["step"] <= known)
        self._stop_if_stale(trainer)
        self._validate_if_due(trainer)

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        """Validate every so many steps."""
        self._validate_if_due(trainer)

    def on_epoch_end(self, trainer: Trainer) -> None:
        """Validate at each epoch's end, unless the configuration says by steps."""
        self._validate_if_due(trainer)

    def on_finish(self, trainer: Trainer) -> None:
        """The last weights are always measured."""
        if self.last_step != trainer.position.step:
            self._validate(trainer)

    def state(self) -> dict[str, Any]:
        """The best so far, and how long ago."""
        return {
            "best_step": self.best_step,
            "best_report": None if self.best_report is None else self.best_report.model_dump(mode="json"),
            "last_step": self.last_step,
            "since_best": self._since_best,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Remember the best."""
        self.best_step = state["best_step"]
        report = state["best_report"]
        self.best_report = None if report is None else ValidationReport.model_validate(report)
        self.last_step = state["last_step"]
        self._since_best = state["since_best"]

    def _validate_if_due(self, trainer: Trainer) -> None:
        """A function of where the run stands alone, so that one that resumes there does what is still to be done."""
        now, every = trainer.position, self.config.every_steps
        due = now.epoch_step == 0 if every is None else now.step % every == 0
        if due and now.step > 0 and self.last_step != now.step:
            self._validate(trainer)

    def _validate(self, trainer: Trainer) -> None:
        start = time.monotonic()
        report = self.validator(trainer.model, trainer.autocast(), trainer.require_undisturbed)
        step = trainer.position.step
        self.last_step = step
        self._since_best += 1
        is_best = self.best_report is None or is_better(report, self.best_report, self.config)
        if is_best:
            self.best_step, self.best_report, self._since_best = step, report, 0
            if trainer.world.is_main:
                told = {"step": step, "validation": report.model_dump(mode="json")}
                weights = {"model": trained_tensors(trainer.model)}
                checkpoints.save(self.best, checkpoints.Checkpoint(weights, told))
        seconds = round(time.monotonic() - start, 2)
        line = {"kind": "validation", "step": step, "epoch": trainer.position.epoch, "tokens": trainer.position.tokens}
        self.metrics_log.write(trainer, {**line, **report.model_dump(mode="json"), "best": is_best, "seconds": seconds})
        if trainer.world.is_main:
            log.info("validation step=%d loss=%.4f eal=%s best=%s", step, report.loss, _text(report.eal), is_best)
        self._stop_if_stale(trainer)

    def _stop_if_stale(self, trainer: Trainer) -> None:
        patience = self.config.early_stop_patience
        if patience is not None and self._since_best >= patience:
            trainer.request_stop(f"no better {self.config.best_metric} in {patience} validations")


def is_better(report: ValidationReport, than: ValidationReport, config: ValidationConfig) -> bool:
    """Whether `report` beats `than` in the configured metric; by loss when that metric was not measured."""
    if config.best_metric != "loss":
        mine, other = getattr(report, config.best_metric), getattr(than, config.best_metric)
        if mine is not None and other is not None:
            return bool(mine > other)
    return report.loss < than.loss


def _text(value: float | None) -> str:
    return "unmeasured" if value is None else f"{value:.4f}"
