"""The training loop. It names no algorithm; everything periodic is a callback.

One optimiser step: sum the loss terms' denominators over the step's batches and all ranks, then run each batch forward
and backward (the loss is already a share of the global mean), clip, check for finiteness, update. So the result does
not depend on how a step's packed rows are spread over batches and ranks, beyond rounding.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from speculators_core.errors import Interrupted, TrainingError
from speculators_core.training.callbacks.base import Callback
from speculators_core.training.checkpoints import Checkpoint
from speculators_core.training.config import TrainingConfig
from speculators_core.training.distributed import World
from speculators_core.training.loader import PackedRows, StepBatches, StepLoader
from speculators_core.training.optimizers import build_optimizers
from speculators_core.training.packing import batch_tensors, num_tokens, to_device
from speculators_core.training.schedules import learning_rate_factor
from speculators_core.training.weights import load_trained_tensors, trained_tensors
from speculators_core.types import Batch, Counted, Objective, StepResult

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Position:
    """Where a run stands: all that the data order and the schedule depend on.

    step       optimiser steps done
    epoch      epochs done
    epoch_step steps done of the current epoch
    tokens     non-padding tokens seen, on all ranks
    """

    step: int = 0
    epoch: int = 0
    epoch_step: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class StepReport:
    """What one optimiser step did, on this rank; `metrics` pool over ranks, the rest is the same on all of them.

    tokens non-padding tokens of the step on all ranks · metrics["loss"] pools to the step's loss · waited_s what this
    rank waited for its batches
    """

    step: int
    tokens: int
    learning_rate: float
    grad_norm: float
    metrics: dict[str, Counted] = field(default_factory=dict)
    waited_s: float = 0.0


class Trainer:
    """Trains `model` on `rows` until the configured end, an early stop, or a signal.

    Public to callbacks: model, config, world, position, total_steps, output, `snapshot`, `request_stop`,
    `require_undisturbed`.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        rows: PackedRows,
        config: TrainingConfig,
        *,
        world: World,
        output: Path,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.model = model.to(world.device)
        self.objective = objective
        self.rows = rows
        self.config = config
        self.world = world
        self.output = output
        self.callbacks = tuple(callbacks)
        self.position = Position()
        self.optimizers = build_optimizers(self.model, config.optimizer)
        self.loader = StepLoader(
            rows,
            accumulation=config.gradient_accumulation,
            rank=world.rank,
            world_size=world.size,
            prefetch=config.prefetch_steps,
        )
        self.total_steps = self._count_steps()
        self._trainable = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._forward = _Forward(self.model, objective)
        self._parallel = DistributedDataParallel(self._forward, broadcast_buffers=False) if world.size > 1 else None
        self._started = time.monotonic()
        self._earlier_seconds = 0.0
        self._counted = 0.0
        self._stop: str | None = None
        self._interrupt: str | None = None
        torch.manual_seed(config.seed + world.rank)

    # ------------------------------------------------------------------------------------------ the loop

    def fit(self) -> None:
        """Run to the end.

        Raises:
            Interrupted: `interrupt` was called (a signal came); progress is saved.
            TrainingError: the loss or the gradient is not finite; the batch is saved beside the run.
        """
        self._started = time.monotonic()
        try:
            self._each("on_start")
            while not self._is_over():
                self._epoch()
            self._each("on_finish")
        except BaseException as error:
            if isinstance(error, Interrupted):  # on all ranks at once
                self._each("on_interrupt")
            for callback in self.callbacks:
                callback.on_error(self, error)
            raise

    def _epoch(self) -> None:
        plan = self.rows.epoch_plan(self.config.seed, self.position.epoch)
        whole, self._counted = self.position.epoch_step == 0, 0.0
        asked = time.monotonic()
        steps = self.loader.steps(plan, self.position.epoch_step, self.require_undisturbed)
        for batches in self.world.together(steps):
            waited = time.monotonic() - asked
            report = replace(self._step(batches), waited_s=waited)
            now = self.position
            self.position = replace(
                now, step=now.step + 1, epoch_step=now.epoch_step + 1, tokens=now.tokens + report.tokens
            )
            for callback in self.callbacks:
                callback.on_step(self, report)
            if self._is_over():
                break
            asked = time.monotonic()
        if self.position.epoch_step == self.loader.num_steps(plan):
            if whole and not self._counted:
                raise TrainingError(
                    f"no training row holds anything to learn by this objective: {len(self.rows.lengths)} rows, none "
                    "with a place to draft from and a token of a reply behind it",
                    mend="bring longer replies; see `draftsmith data sample RECIPE` for what is supervised",
                )
            self.position = replace(self.position, epoch=self.position.epoch + 1, epoch_step=0)
            if not self._is_over():  # else `on_finish` follows at once
                self._each("on_epoch_end")

    def _step(self, batches: StepBatches) -> StepReport:
        tokens, denominators = self._agree(batches)
        results = [
            self._forward_backward(batch, denominators, index, batches) for index, batch in enumerate(batches.batches)
        ]
        limit = self.config.clip_norm if self.config.clip_norm is not None else float("inf")
        grad_norm = float(nn.utils.clip_grad_norm_(self._trainable, limit, foreach=True))
        losses = [float(result.loss.detach()) for result in results]
        self._require_finite(losses, grad_norm, batches)
        factor = learning_rate_factor(self.config.schedule, self.position.step, self.total_steps)
        self.optimizers.step(factor)
        metrics = _pool(results)
        metrics["loss"] = Counted(sum(losses), 1.0 / self.world.size)
        rate = self.optimizers.peak_rates[0] * factor
        return StepReport(self.position.step + 1, tokens, rate, grad_norm, metrics)

    def _agree(self, batches: StepBatches) -> tuple[int, Tensor]:
        """One collective before the forward pass: global denominators and tokens, and whether any rank must stop."""
        mine = torch.tensor([sum(map(num_tokens, batches.batches)), self._interrupt is not None], dtype=torch.float64)
        shared = self.world.sum(torch.cat([mine, batches.denominators]))
        self._counted += float(shared[2:].sum())
        if shared[1]:
            raise self._interrupted()
        return int(shared[0]), shared[2:].clamp_min(1.0).to(self.world.device)

    def _interrupted(self) -> Interrupted:
        return Interrupted(
            f"training stopped by {self._interrupt or 'another rank'} after step {self.position.step}",
            mend="start the same command again: it goes on from this step",
        )

    def _forward_backward(self, batch: Batch, denominators: Tensor, index: int, batches: StepBatches) -> StepResult:
        is_last = index == len(batches.batches) - 1
        module: nn.Module = self._forward if self._parallel is None else self._parallel
        hold = nullcontext() if self._parallel is None or is_last else self._parallel.no_sync()
        with hold:
            with self.autocast():
                moved = to_device(batch, self.world.device) if batches.supervised[index] else None
                result: StepResult = module(moved, denominators)
            # times size undoes the reduction's mean over ranks: the denominators are global already
            torch.autograd.backward(result.loss * self.world.size)
        return result

    # ------------------------------------------------------------------------------------------ for callbacks

    def autocast(self) -> torch.autocast:
        """bf16 autocast where the configuration asks for it."""
        return torch.autocast(self.world.device.type, torch.bfloat16, enabled=self.config.precision == "bf16")

    def request_stop(self, reason: str) -> None:
        """End after this step as if the run were complete. All ranks must ask at the same step."""
        self._stop = reason

    def interrupt(self, reason: str) -> None:
        """Save and raise Interrupted before the next step. Any rank may ask, from a signal handler too."""
        self._interrupt = reason

    def require_undisturbed(self) -> None:
        """Raise Interrupted where this rank was interrupted; for what takes long."""
        if self._interrupt is not None:
            raise self._interrupted()

    @property
    def stop_reason(self) -> str | None:
        """Why the run ended before its last step, if it did."""
        return self._stop

    @property
    def seconds(self) -> float:
        """Wall-clock seconds spent training, those before a resume included."""
        return self._earlier_seconds + time.monotonic() - self._started

    def snapshot(self) -> Checkpoint:
        """Everything needed to go on exactly, from all ranks (a collective). Tensors are views, not copies."""
        return Checkpoint(
            tensors={
                "model": trained_tensors(self.model),
                "optimizer": self.optimizers.state_tensors(),
                "random": self._random_states(),
            },
            state={
                "position": vars(self.position),
                "seconds": self.seconds,
                "world_size": self.world.size,
                "config": self.config.model_dump(mode="json"),
                "callbacks": {callback.name: callback.state() for callback in self.callbacks},
            },
        )

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from a snapshot. TrainingError when it belongs to another draft or another configuration."""
        self._require_same_run(checkpoint.state)
        load_trained_tensors(self.model, checkpoint.tensors["model"])
        self.optimizers.load_state_tensors(checkpoint.tensors["optimizer"])
        random = checkpoint.tensors["random"]
        torch.set_rng_state(random[f"cpu.{self.world.rank}"])
        if self.world.device.type == "cuda":
            torch.cuda.set_rng_state(random[f"cuda.{self.world.rank}"], self.world.device)
        self.position = Position(**checkpoint.state["position"])
        self._earlier_seconds = float(checkpoint.state["seconds"])
        for callback in self.callbacks:
            callback.restore(checkpoint.state["callbacks"].get(callback.name, {}))

    # ------------------------------------------------------------------------------------------ details

    def _is_over(self) -> bool:
        return self._stop is not None or self.position.step >= self.total_steps

    def _each(self, hook: str) -> None:
        for callback in self.callbacks:
            getattr(callback, hook)(self)

    def _count_steps(self) -> int:
        config = self.config
        total = 0
        for epoch in range(config.epochs):
            total += self.loader.num_steps(self.rows.epoch_plan(config.seed, epoch))
            if config.max_steps is not None and total >= config.max_steps:
                return config.max_steps
        return total

    def _random_states(self) -> dict[str, Tensor]:
        mine = {"cpu": torch.get_rng_state().tolist()}
        if self.world.device.type == "cuda":
            mine["cuda"] = torch.cuda.get_rng_state(self.world.device).tolist()
        return {
            f"{kind}.{rank}": torch.tensor(state, dtype=torch.uint8)
            for rank, states in enumerate(self.world.gather(mine))
            for kind, state in states.items()
        }

    def _require_same_run(self, state: Any) -> None:
        mine = self.config.model_dump(mode="json")
        free = ("checkpoint", "log_every_steps", "prefetch_steps", "threads", "device")
        changed = [key for key, value in state["config"].items() if key not in free and mine.get(key) != value]
        if state["world_size"] != self.world.size and "processes" not in changed:
            changed.append("processes")
        if changed:
            raise TrainingError(
                f"{self.output} holds a run with other settings: {', '.join(sorted(changed))}",
                mend="train into a fresh output directory, or put the settings back",
            )

    def _require_finite(self, losses: Sequence[float], grad_norm: float, batches: StepBatches) -> None:
        values = torch.tensor([*losses, grad_norm])
        if bool(values.isfinite().all()):
            return
        bad = [i for i, finite in enumerate(values[:-1].isfinite().tolist()) if not finite] or range(len(losses))
        path = self.output / "non-finite" / f"step-{self.position.step + 1:08d}-rank-{self.world.rank}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {f"{i}.{name}": value for i in bad for name, value in batch_tensors(batches.batches[i]).items()}
        told = {str(i): f"loss={losses[i]} rows={[*batches.rows[i]] if i < len(batches.rows) else []}" for i in bad}
        safetensors.torch.save_file(tensors, path, metadata={"grad_norm": str(grad_norm), **told})
        raise TrainingError(
            f"not finite at step {self.position.step + 1}: losses {losses}, gradient norm {grad_norm}; "
            f"the batch is saved as {path}",
            mend="lower the learning rate, or check the states of the rows that the file's metadata names; "
            "the checkpoints before this step are whole",
        )


class _Forward(nn.Module):
    """Model and objective as one module, so that data parallelism wraps whatever the objective calls."""

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model = model
        self.objective = objective

    def forward(self, batch: Batch | None, denominators: Tensor) -> StepResult:
        if batch is None:  # nothing to learn, but the reduction over ranks waits for every gradient
            zeros = [parameter.sum() * 0.0 for parameter in self.model.parameters() if parameter.requires_grad]
            return StepResult(torch.stack(zeros).sum(), {})
        return self.objective.step(self.model, batch, denominators)


def _pool(results: Sequence[StepResult]) -> dict[str, Counted]:
    pooled: dict[str, Counted] = {}
    for result in results:
        for name, value in result.metrics.items():
            pooled[name] = pooled.get(name, Counted(0.0, 0.0)) + value
    return pooled
