"""What both sides of a bench are told, and what that comes to: requests, rows, batches, a fresh draft."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from speculators_core.bench.cases import case
from speculators_core.build import open_states, supervised_counts
from speculators_core.drafts import algorithm_of
from speculators_core.training.config import OptimizerConfig, ScheduleConfig, TrainingConfig, ValidationConfig
from speculators_core.training.request import TrainRequest
from speculators_core.types import StrictModel

if TYPE_CHECKING:
    from speculators_core.training.loader import PackedRows


class BenchSettings(StrictModel):
    """What both sides are told."""

    case: str = Field("eagle3", description="algorithm, by its name in bench.cases")
    states: str = Field(description="directory of the hidden-state set")
    verifier: str = Field(description="directory of the verifier")
    draft_vocabulary: int = Field(8192, ge=1, description="D")
    row_tokens: int = Field(1024, ge=2, description="tokens of a packed row")
    steps: int = Field(60, ge=2, description="optimiser steps of a run")
    warmup_steps: int = Field(20, ge=1, description="steps before the clock starts")
    runs: int = Field(3, ge=1, description="runs of each side, alternating")
    threads: int = Field(2, ge=1, description="torch threads")
    optimizer: Literal["adamw", "muon"] = Field("adamw", description="of both sides; muon: with AdamW for the rest")
    learning_rate: float = Field(1e-3, gt=0, description="peak rate")
    schedule: Literal["none", "linear"] = Field(
        "none", description="constant, or linear to zero after a warm-up of 1 %"
    )
    seed: int = Field(0, ge=0, description="of weights and order")

    @property
    def schedule_warmup(self) -> int:
        """Steps over which the learning rate rises."""
        return 0 if self.schedule == "none" else self.steps // 100


def packed_rows(settings: BenchSettings) -> PackedRows:
    """The training rows as both sides see them."""
    return rows_of(request_of(settings, Path()))


def request_of(settings: BenchSettings, output: Path) -> TrainRequest:
    """Our side's request for a training into `output`."""
    from speculators_core.states.sets import StateSet

    training = TrainingConfig(
        epochs=1000,
        max_steps=settings.steps,
        row_tokens=settings.row_tokens,
        optimizer=OptimizerConfig(
            kind=settings.optimizer,
            learning_rate=settings.learning_rate,
            betas=(0.9, 0.999),  # the peer's
        ),
        validation=ValidationConfig(walk_rows=None, walk_k=case(settings.case).k),
        schedule=ScheduleConfig(kind=settings.schedule, warmup_steps=settings.schedule_warmup),
        threads=settings.threads,
        seed=settings.seed,
    )
    told = case(settings.case)
    layers = StateSet.open(Path(settings.states)).layer_ids[:-1]
    return TrainRequest(
        states=settings.states,
        verifier=settings.verifier,
        algorithm={**told.ours, "aux_layers": layers} if layers else told.ours,
        training=training,
        draft_vocabulary_size=None if told.whole_vocabulary else settings.draft_vocabulary,
        output=str(output),
    )


def rows_of(request: TrainRequest, split: str = "train") -> PackedRows:
    """A split's rows, packed."""
    import torch

    from speculators_core.training.loader import PackedRows

    algorithm, settings = algorithm_of(request.algorithm)
    states = open_states(request, algorithm, settings)
    objective = algorithm.objective(settings)
    return PackedRows(states, objective, split, request.training.row_tokens, dtype=torch.bfloat16)


def batches_of(rows: PackedRows, config: TrainingConfig, steps: int) -> list[list[int]]:
    """Row numbers of each step, over as many epochs as it takes, in the trainer's own order."""
    batches: list[list[int]] = []
    epoch = 0
    while len(batches) < steps:
        batches += [list(packed) for packed in rows.epoch_plan(config.seed, epoch).rows]
        epoch += 1
    return batches[:steps]


def build_model(request: TrainRequest) -> Any:
    """A fresh draft, and its vocabulary: None where it is the verifier's."""
    from speculators_core.data.vocabulary import select_draft_vocabulary
    from speculators_core.verifier.facts import read_facts

    algorithm, settings = algorithm_of(request.algorithm)
    vocabulary = None
    if request.draft_vocabulary_size is not None:
        states = open_states(request, algorithm, settings)
        size = read_facts(Path(request.verifier)).vocab_size
        vocabulary = select_draft_vocabulary(supervised_counts(states, size), request.draft_vocabulary_size, size)
    return algorithm.build(settings, Path(request.verifier), vocabulary, request.training.seed), vocabulary
