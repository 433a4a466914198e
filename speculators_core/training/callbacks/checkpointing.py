"""Saves progress by steps or by seconds, keeps the newest few, and finds the place to go on from."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

from speculators_core.training import checkpoints
from speculators_core.training.callbacks.base import Callback
from speculators_core.training.config import CheckpointConfig

if TYPE_CHECKING:
    from speculators_core.training.trainer import StepReport, Trainer

log = logging.getLogger(__name__)


class Checkpointing(Callback):
    """Put it before what takes long or may fail at the same step: that is done by whoever goes on from there."""

    name = "checkpointing"

    def __init__(self, root: Path, config: CheckpointConfig) -> None:
        self.root = root
        self.config = config
        self._saved_at = time.monotonic()
        self._saved_step: int | None = None

    def resume(self, trainer: Trainer) -> bool:
        """Restore the newest whole checkpoint into `trainer`; False when there is none. Damaged ones are reported."""
        found: Path | None = None
        if trainer.world.is_main:
            found, reports = checkpoints.latest(self.root)
            for report in reports:
                log.warning(report)
        shared = trainer.world.gather(None if found is None else str(found))[0]
        if shared is None:
            return False
        trainer.restore(checkpoints.load(Path(shared)))
        log.info("going on from checkpoint=%s step=%d", Path(shared).name, trainer.position.step)
        self._saved_step = trainer.position.step
        return True

    def on_start(self, trainer: Trainer) -> None:
        """The clock of `every_seconds` starts."""
        self._saved_at = time.monotonic()

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        """Save when due."""
        by_step = self.config.every_steps is not None and trainer.position.step % self.config.every_steps == 0
        if by_step or self._is_time(trainer):
            self._save(trainer)

    def on_epoch_end(self, trainer: Trainer) -> None:
        """Save, when asked to."""
        if self.config.every_epoch:
            self._save(trainer)

    def on_interrupt(self, trainer: Trainer) -> None:
        """Save where the run stands."""
        if self._saved_step != trainer.position.step:
            self._save(trainer)

    def on_finish(self, trainer: Trainer) -> None:
        """Save the end, so that a rerun has no step left to do."""
        self._save(trainer)

    def _is_time(self, trainer: Trainer) -> bool:
        if self.config.every_seconds is None:
            return False
        due = time.monotonic() - self._saved_at >= self.config.every_seconds
        return bool(trainer.world.gather(due)[0])  # the ranks' clocks differ; the main one's decides

    def _save(self, trainer: Trainer) -> None:
        start = time.monotonic()
        snapshot = trainer.snapshot()
        if trainer.world.is_main:
            step = trainer.position.step
            path = checkpoints.save(checkpoints.path_of(self.root, step), snapshot)
            checkpoints.prune(self.root, self.config.keep)
            log.info("checkpoint=%s seconds=%.2f", path.name, time.monotonic() - start)
        trainer.world.barrier()
        self._saved_at = time.monotonic()
        self._saved_step = trainer.position.step
