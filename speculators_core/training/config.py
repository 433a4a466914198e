"""Everything that can be set about training, whatever the algorithm. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from speculators_core.types import MOST_DRAFTED, MOST_TOKENS, StrictModel

BestMetric = Literal["eal", "eal_mean_positions", "loss"]


Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(StrictModel):
    """AdamW for everything, or Muon for hidden matrices with AdamW for the rest."""

    kind: Literal["adamw", "muon"] = Field("adamw", description="muon: 2-D hidden weights by Muon, the rest by AdamW")
    learning_rate: float = Field(1e-3, gt=0, description="peak learning rate of AdamW")
    betas: tuple[Decay, Decay] = Field((0.9, 0.95), description="AdamW's decay rates of the two moments")
    eps: float = Field(1e-8, gt=0, description="AdamW's epsilon")
    weight_decay: float = Field(0.01, ge=0, description="AdamW's decoupled weight decay; matrices only")
    muon_learning_rate: float | None = Field(None, gt=0, description="peak learning rate of Muon; null: learning_rate")
    muon_momentum: float = Field(0.95, ge=0, lt=1, description="Muon's momentum")
    muon_weight_decay: float = Field(0.1, ge=0, description="Muon's decoupled weight decay")


class ScheduleConfig(StrictModel):
    """Learning rate over the run, as a factor of the peak."""

    kind: Literal["linear", "cosine", "none"] = Field("cosine", description="shape of the decay after the warm-up")
    warmup_steps: int | None = Field(None, ge=0, description="steps of linear warm-up; null: warmup_share of the run")
    warmup_share: float = Field(0.04, ge=0, lt=1, description="share of the run that warms up, without steps")
    final_factor: float = Field(0.0, ge=0, le=1, description="factor that the decay ends at")


class ValidationConfig(StrictModel):
    """When the draft is measured on rows that it does not train on, and what that decides."""

    every_steps: int | None = Field(None, ge=1, description="steps between validations; null: each epoch's end")
    max_rows: int | None = Field(None, ge=1, description="rows used, the first ones of the split; null: all")
    walk_rows: int | None = Field(64, ge=0, description="rows walked for the expected acceptance length; null: all")
    walk_k: int = Field(3, ge=1, le=MOST_DRAFTED, description="drafts proposed at each drafting point of the walk")
    best_metric: BestMetric = Field("eal", description="what `best/` is chosen by; falls back to loss when unmeasured")
    early_stop_patience: int | None = Field(
        None, ge=1, description="validations without a better best_metric after which training stops; null: never"
    )


class CheckpointConfig(StrictModel):
    """When progress is saved, and how much of it is kept."""

    every_steps: int | None = Field(200, ge=1, description="optimiser steps between checkpoints; null: none by steps")
    every_epoch: bool = Field(True, description="also at each epoch's end")
    every_seconds: float | None = Field(None, gt=0, description="also after this many seconds; null: by steps only")
    keep: int = Field(2, ge=1, description="checkpoints kept; older ones of this run are deleted")
    keep_when_finished: bool = Field(False, description="keep them beside the result of a finished run too")


class TrainingConfig(StrictModel):
    """How a draft is trained. The result of a run depends on these values, its inputs and `seed` alone."""

    warm_start: str | None = Field(
        None,
        description="draft to start from instead of random weights: a directory, `champion` (of this deployment, where "
        "it has one), or `model@alias`; frozen parts always come from the verifier",
    )
    epochs: int = Field(1, ge=1, description="passes over the training rows")
    max_steps: int | None = Field(None, ge=1, description="optimiser steps after which training ends; null: by epochs")
    row_tokens: int = Field(
        1024, ge=2, le=MOST_TOKENS, description="T: tokens of a packed row; longer rows are clipped, and counted"
    )
    gradient_accumulation: int = Field(1, ge=1, description="packed rows of one optimiser step in each process")
    clip_norm: float | None = Field(1.0, gt=0, description="largest global norm of the gradient; null: no clipping")
    precision: Literal["bf16", "fp32"] = Field("bf16", description="autocast over fp32 master weights, or plain fp32")
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="optimiser and its rates")
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig, description="learning rate over the run")
    validation: ValidationConfig = Field(default_factory=ValidationConfig, description="measuring and choosing")
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="saving and keeping")
    log_every_steps: int = Field(10, ge=1, description="optimiser steps between lines of metrics.jsonl")
    prefetch_steps: int = Field(
        2, ge=1, le=1024, description="optimiser steps' batches read ahead by the loader's thread"
    )
    processes: int = Field(1, ge=1, le=4096, description="data-parallel processes under torchrun")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where there is one")
    threads: int | None = Field(
        None, ge=1, le=4096, description="torch threads of each process; null: cores / processes"
    )
    seed: int = Field(0, ge=0, description="seed of initial weights, packing and every draw")
    deterministic: bool = Field(False, description="ask torch for deterministic kernels (on a CPU they are anyway)")

    @model_validator(mode="after")
    def _ends(self) -> TrainingConfig:
        warmup = self.schedule.warmup_steps
        if self.max_steps is not None and warmup is not None and warmup >= self.max_steps:
            raise ValueError(f"schedule.warmup_steps ({warmup}) leaves nothing of max_steps ({self.max_steps})")
        return self
