"""What a training process is told, and what it leaves in its output directory for whoever started it.

metrics.jsonl                  one line for each logged step and validation
checkpoints/                   where a rerun goes on from; removed when the run has finished
best/                          the best weights
draft_vocabulary.safetensors   d2t and t2d, when the draft's vocabulary is reduced
run.json                       what the directory is claimed for: states and draft
result.json                    the end: numbers of the run
outcome.json                   finished, interrupted or failed, with the error's text
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from speculators_core.states.config import OnlineRequest
from speculators_core.store.files import write_atomic
from speculators_core.training.config import TrainingConfig
from speculators_core.types import StrictModel

METRICS, RESULT, OUTCOME, IDENTITY = "metrics.jsonl", "result.json", "outcome.json", "run.json"
VOCABULARY, BEST = "draft_vocabulary.safetensors", "best"


class TrainRequest(StrictModel):
    """All that a training process is told."""

    states: str = Field("", description="directory of the hidden-state set")
    online: OnlineRequest | None = Field(None, description="in place of a set: where states are asked for")
    verifier: str = Field(description="directory of the verifier that the states come from")
    algorithm: dict[str, Any] = Field(description="`kind`, and that algorithm's own knobs")
    training: TrainingConfig = Field(default_factory=TrainingConfig, description="how to train")
    draft_vocabulary_size: int | None = Field(None, ge=1, description="tokens the draft can propose; null: all")
    draft_vocabulary_from: str | None = Field(
        None, description="draft or file of tables that names them; null: the most frequent supervised ones"
    )
    output: str = Field(description="directory to write into, and to go on in")
    warm_start: str | None = Field(
        None, description="checkpoint or exported draft whose trainable weights to start from; null: random ones"
    )
    warm_head: bool = Field(
        True, description="whether that includes its draft vocabulary and a trained head: not where tokens changed"
    )


class TrainReport(StrictModel):
    """`result.json`: what a finished run has to say."""

    steps: int = Field(description="optimiser steps")
    epochs: int = Field(description="whole epochs")
    tokens: int = Field(description="non-padding tokens trained on, repeated epochs included")
    seconds: float = Field(description="wall-clock seconds of training, those before a resume included")
    tokens_per_s: float = Field(description="tokens / seconds, validations and checkpoints included")
    processes: int = Field(description="data-parallel processes")
    clipped_rows: int = Field(description="training rows longer than row_tokens, cut to it")
    fill: float = Field(description="share of the packed rows that is not padding")
    best_step: int = Field(description="step of the weights in best/")
    validation: dict[str, Any] = Field(description="loss, eal, eal_mean_positions, per_position … of the best weights")
    stopped: str | None = Field(description="why the run ended before its last step, if it did")
    warm_start: bool = Field(description="whether it began from another draft's weights")
    trainable_parameters: int = Field(description="numbers that training changed")


class Outcome(StrictModel):
    """`outcome.json`: how the last process ended, for whoever started it."""

    outcome: Literal["finished", "interrupted", "failed"] = Field(description="how it ended")
    error: str | None = Field(None, description="class name of the error")
    what: str | None = Field(None, description="the error's sentence")
    mend: str | None = Field(None, description="what to do about it")


def write_json(path: Path, text: str) -> None:
    """Write one of these files, whole or not at all; its directory is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, lambda part: part.write_text(text + "\n", encoding="utf-8"))
