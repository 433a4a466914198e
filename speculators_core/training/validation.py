"""Measuring a draft on rows that it does not train on: loss, and the acceptance length it promises."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager

import torch
from torch import nn

from speculators_core.training.config import ValidationConfig
from speculators_core.training.distributed import World
from speculators_core.training.loader import PackedRows, StepBatches, StepLoader
from speculators_core.training.packing import to_device
from speculators_core.types import Aligned, Counted, Objective, StrictModel

SEED = 20_240_229
"""Every validation draws the same random numbers, so that two of them differ by the weights alone."""


class ValidationReport(StrictModel):
    """One validation.

    loss                global mean over the split's supervised positions
    eal                 1 + accepted/drafts over walked replies, as serving would draft; None when nothing was walked
    per_position        share of drafting points at which proposal 1, 2 … k was accepted
    drafts              drafting points walked
    eal_mean_positions  the plain mean over all positions, whatever position serving would land on; None if not counted
    metrics             means of the objective's own metrics
    """

    loss: float
    eal: float | None
    per_position: tuple[float, ...]
    drafts: int
    eal_mean_positions: float | None
    metrics: dict[str, float]


class Validator:
    """Measures on the fixed packing of the validation rows, spread over the ranks."""

    def __init__(self, rows: PackedRows, objective: Objective, config: ValidationConfig, world: World) -> None:
        self.rows = rows
        self.objective = objective
        self.config = config
        self.world = world
        self.plan = rows.fixed_plan()
        self.loader = StepLoader(rows, accumulation=1, rank=world.rank, world_size=world.size, prefetch=1)
        self._denominators: torch.Tensor | None = None

    def __call__(
        self, model: nn.Module, autocast: AbstractContextManager[object], look: Callable[[], None] = lambda: None
    ) -> ValidationReport:
        """Validate `model`; its mode and the random state are as before afterwards. A collective.

        `look` is called between rows; what it raises on one rank ends the validation on all of them.
        """
        was_training = model.training
        model.eval()
        devices = [self.world.device] if self.world.device.type == "cuda" else []
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=devices), autocast:
                torch.manual_seed(SEED + self.world.rank)
                metrics = self._losses(model, look)
                walked = self._walk(model, look)
        finally:
            model.train(was_training)
        return _report(self.world.pool(metrics), self.world.pool(walked), self.config.walk_k, self.world.size)

    def _losses(self, model: nn.Module, look: Callable[[], None]) -> dict[str, Counted]:
        if self._denominators is None:  # of the rows alone, so the same every time
            mine = torch.stack([step.denominators for step in self._steps(look)]).sum(dim=0)
            self._denominators = self.world.sum(mine).clamp_min(1.0)
        denominators = self._denominators.to(self.world.device)
        metrics: dict[str, Counted] = {}
        loss = 0.0
        for step in self._steps(look):
            for batch, supervised in zip(step.batches, step.supervised, strict=True):
                if not supervised:
                    continue
                result = self.objective.step(model, to_device(batch, self.world.device), denominators)
                loss += float(result.loss)
                for name, value in result.metrics.items():
                    metrics[name] = metrics.get(name, Counted(0.0, 0.0)) + value
        metrics["loss"] = Counted(loss, 1.0 / self.world.size)
        return metrics

    def _steps(self, look: Callable[[], None]) -> Iterator[StepBatches]:
        def looking() -> Generator[StepBatches]:
            for step in self.loader.steps(self.plan, waiting=look):
                look()
                yield step

        return self.world.together(looking())

    def _walk(self, model: nn.Module, look: Callable[[], None]) -> dict[str, Counted]:
        limit = self.config.walk_rows
        rows = range(len(self.rows.positions))[: limit if limit is not None else None]
        mine = rows[self.world.rank :: self.world.size]
        k = self.config.walk_k
        accepted = [0] * (k + 1)  # how many drafting points accepted at least i proposals
        with self.world.one_fate(), self.rows.expecting(mine):
            for row in mine:
                look()
                aligned = _to_device(self.rows.aligned(row), self.world.device)
                for count in self.objective.walk(model, aligned, k):
                    for at_least in range(int(count) + 1):
                        accepted[at_least] += 1
        return {f"{i:02d}": Counted(float(n), float(accepted[0])) for i, n in enumerate(accepted)}


def _report(metrics: Mapping[str, Counted], walked: Mapping[str, Counted], k: int, size: int) -> ValidationReport:
    means = {name: value.mean for name, value in metrics.items() if name != "loss" and value.count}
    drafts = int(walked["00"].count)
    per_position = tuple(walked[f"{i:02d}"].mean for i in range(1, k + 1)) if drafts else ()
    return ValidationReport(
        loss=metrics["loss"].mean,
        eal=1.0 + sum(per_position) if drafts else None,
        per_position=per_position,
        drafts=drafts,
        eal_mean_positions=eal_over_positions(means),
        metrics=means,
    )


def eal_over_positions(means: Mapping[str, float]) -> float | None:
    """What all positions promise: the objective's own `eal`, else 1 + Σ `full_acc_k`; None when it counts neither."""
    if "eal" in means:
        return means["eal"]
    steps = [value for name, value in means.items() if name.startswith("full_acc_")]
    return 1.0 + sum(steps) if steps else None


def _to_device(aligned: Aligned, device: torch.device) -> Aligned:
    return Aligned(
        input_ids=aligned.input_ids.to(device),
        loss_mask=aligned.loss_mask.to(device),
        position_ids=aligned.position_ids.to(device),
        aux_TAH=aligned.aux_TAH.to(device),
        last_TH=aligned.last_TH.to(device),
    )
