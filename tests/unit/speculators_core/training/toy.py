"""A tiny algorithm and an in-memory state set, so that training is tested without any real draft."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from speculators_core.training.callbacks.base import Callback
from speculators_core.training.callbacks.checkpointing import Checkpointing
from speculators_core.training.callbacks.metrics_log import MetricsLog
from speculators_core.training.callbacks.validating import Validating
from speculators_core.training.config import TrainingConfig
from speculators_core.training.distributed import World
from speculators_core.training.loader import PackedRows
from speculators_core.training.trainer import StepReport, Trainer
from speculators_core.training.validation import Validator
from speculators_core.types import Aligned, Batch, Counted, Sample, StepResult

H, V, AUX = 8, 32, 2
CPU = World(0, 1, torch.device("cpu"))


@dataclass(frozen=True)
class Row:
    index: int
    split: str
    input_ids: Tensor
    loss_mask: Tensor
    hidden_states: Tensor


class MemoryStates:
    """Same interface as a state set on disk."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = list(rows)

    @property
    def lengths(self) -> list[int]:
        return [len(row.input_ids) for row in self._rows]

    @property
    def splits(self) -> list[str]:
        return [row.split for row in self._rows]

    def row(self, position: int) -> Row:
        return self._rows[position]

    def expecting(self, positions: Iterable[int]) -> AbstractContextManager[None]:
        return nullcontext()


def make_states(num_train: int = 24, num_validation: int = 5, *, seed: int = 0, longest: int = 20) -> MemoryStates:
    draws = torch.Generator().manual_seed(seed)
    rows = []
    for index in range(num_train + num_validation):
        length = int(torch.randint(4, longest + 1, (1,), generator=draws))
        rows.append(
            Row(
                index=index,
                split="train" if index < num_train else "validation",
                input_ids=torch.randint(0, V, (length,), generator=draws),
                loss_mask=torch.arange(length) >= length // 3,
                hidden_states=torch.randn(length, AUX + 1, H, generator=draws),
            )
        )
    return MemoryStates(rows)


class ToyDraft(nn.Module):
    """logits = head · (fc(running document mean of features) · norm + embedding); noise while training."""

    def __init__(self, seed: int = 0, noise: float = 0.01) -> None:
        super().__init__()
        draws = torch.Generator().manual_seed(seed)
        self.embed_tokens = nn.Embedding.from_pretrained(torch.randn(V, H, generator=draws), freeze=True)
        self.lm_head = nn.Parameter(torch.randn(V, H, generator=draws), requires_grad=False)
        self.fc = nn.Linear(AUX * H, H, bias=False)
        self.norm = nn.Parameter(torch.ones(H))
        self.fc.weight.data.copy_(0.1 * torch.randn(H, AUX * H, generator=draws))
        self.register_buffer("d2t", torch.arange(V))
        self.noise = noise

    def forward(self, batch: Batch) -> Tensor:
        same = (batch.document_ids[:, None] == batch.document_ids[None, :]) & (batch.document_ids >= 0)[:, None]
        weights = torch.tril(same.float())
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(1.0)
        hidden = self.fc(weights @ batch.aux_TAH.float()) * self.norm + self.embed_tokens(batch.input_ids)
        if self.training and self.noise:
            hidden = hidden + self.noise * torch.randn(hidden.shape)
        return hidden.float() @ self.lm_head.T


class ToyObjective:
    """Cross entropy against the argmax of the head on the last states; rows lose one token to the shift."""

    def align(self, sample: Sample) -> Aligned:
        return Aligned(
            input_ids=sample.input_ids[1:],
            loss_mask=sample.loss_mask[1:],
            position_ids=sample.position_ids[1:],
            aux_TAH=sample.hidden_states[:-1, :-1].flatten(1),
            last_TH=sample.hidden_states[1:, -1],
        )

    def denominators(self, batch: Batch) -> Tensor:
        return batch.loss_mask.sum().to(torch.float64).reshape(1)

    def step(self, model: nn.Module, batch: Batch, denominators: Tensor) -> StepResult:
        logits = model(batch)
        labels = (batch.last_TH.float() @ model.lm_head.T).argmax(-1)
        losses = nn.functional.cross_entropy(logits, labels, reduction="none")[batch.loss_mask]
        right = (logits.argmax(-1) == labels)[batch.loss_mask]
        return StepResult(
            loss=losses.sum() / denominators[0].to(losses.dtype),
            metrics={"full_acc_0": Counted(float(right.sum()), float(right.numel()))},
        )

    def walk(self, model: nn.Module, aligned: Aligned, k: int) -> list[int]:
        batch = Batch(document_ids=torch.zeros_like(aligned.input_ids), **vars(aligned))
        labels = (batch.last_TH.float() @ model.lm_head.T).argmax(-1)
        right = (model(batch).argmax(-1) == labels).tolist()
        accepted, at = [], 0
        while at < len(right):
            run = 0
            while run < k and at + run < len(right) and right[at + run]:
                run += 1
            accepted.append(run)
            at += run + 1
        return accepted


class Recorder(Callback):
    """Keeps every step's report, and may act at one step."""

    name = "recorder"

    def __init__(self, at: int | None = None, act: str | None = None) -> None:
        self.reports: list[StepReport] = []
        self.at, self.act = at, act

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        self.reports.append(report)
        if report.step == self.at and self.act is not None:
            trainer.interrupt(self.act)


def config(**changes: object) -> TrainingConfig:
    base: dict[str, object] = {
        "epochs": 3,
        "row_tokens": 32,
        "precision": "fp32",
        "log_every_steps": 1,
        "optimizer": {"learning_rate": 0.05},
        "checkpoint": {"every_steps": 4},
    }
    return TrainingConfig.model_validate({**base, **changes})


def make_trainer(
    output: Path,
    settings: TrainingConfig,
    *,
    states: MemoryStates | None = None,
    model: ToyDraft | None = None,
    world: World = CPU,
    extra: Sequence[Callback] = (),
) -> Trainer:
    """A trainer with the callbacks that a real run has, resumed when `output` holds a checkpoint."""
    states = states or make_states()
    objective = ToyObjective()
    held_out = PackedRows(states, objective, "validation", settings.row_tokens)
    metrics_log = MetricsLog(output / "metrics.jsonl", settings.log_every_steps)
    validator = Validator(held_out, objective, settings.validation, world)
    validating = Validating(validator, settings.validation, output / "best", metrics_log)
    saving = Checkpointing(output / "checkpoints", settings.checkpoint)
    trainer = Trainer(
        model or ToyDraft(),
        objective,
        PackedRows(states, objective, "train", settings.row_tokens),
        settings,
        world=world,
        output=output,
        callbacks=(metrics_log, *extra, saving, validating),
    )
    saving.resume(trainer)
    return trainer
