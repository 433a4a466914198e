"""The contract of a callback: hooks around the loop, and a memory that checkpoints keep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from speculators_core.training.trainer import StepReport, Trainer


class Callback:
    """Does nothing; override what is needed.

    Hooks run on every rank in the same order, so they may use collectives, except `on_error`, which one rank may reach
    alone. A callback uses the trainer's public attributes only.
    """

    name = "callback"

    def on_start(self, trainer: Trainer) -> None:
        """Before the first step, after a restore."""

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        """After each optimiser step; `trainer.position` counts it already."""

    def on_epoch_end(self, trainer: Trainer) -> None:
        """After an epoch but the last one; `trainer.position` stands at the next epoch's start."""

    def on_interrupt(self, trainer: Trainer) -> None:
        """All ranks have agreed to stop between two steps because of a signal."""

    def on_finish(self, trainer: Trainer) -> None:
        """After the last step, also when `request_stop` ended the run."""

    def on_error(self, trainer: Trainer, error: BaseException) -> None:
        """The loop is being left by `error` (Interrupted too). No collectives; must not raise."""

    def state(self) -> dict[str, Any]:
        """What this callback must remember over a resume, as JSON."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` gave."""
