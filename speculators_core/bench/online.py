"""Training beside an engine that streams states to it: together against each alone, a processor each.

Rules: the engine is pinned to one processor and the trainer to another, in all three measurements, which alternate;
the same rows in the same order, and no prefix cache that knows them from before; the first steps warm up and do not
count; no checkpoint and no validation in between; medians. The slower of the two is the speed that nothing can beat.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from contextlib import AbstractContextManager, closing
from pathlib import Path

from pydantic import Field

from speculators_core.errors import DataError
from speculators_core.states.config import OnlineRequest
from speculators_core.training.callbacks.metrics_log import read_metrics
from speculators_core.training.request import METRICS, TrainRequest
from speculators_core.training_process import run_training
from speculators_core.types import StrictModel

WARM_UP = 8
"""Steps that do not count: the window fills, caches warm."""


class OnlineBenchReport(StrictModel):
    """Tokens a second of each alone and of both together."""

    engine: float = Field(description="tokens/s that the engine streams to a reader that throws them away")
    trainer: float = Field(description="tokens/s of training on captured states")
    together: float = Field(description="tokens/s of training on states that the engine streams")
    ratio: float = Field(description="together / min(engine, trainer); the goal is at least 0.9")
    waited: float = Field(description="share of the time that training together waited for states")
    steps: int = Field(description="steps that were counted")
    row_tokens: int = Field(description="tokens of a step")
    rounds: int = Field(description="measurements of each, of which these are the medians")
    backend: str = Field(description="how records travelled")

    def table(self) -> str:
        """For a terminal."""
        return "\n".join(
            [
                f"{self.rounds} × {self.steps} steps of {self.row_tokens} tokens, records by {self.backend}, "
                "a processor for each side",
                f"engine alone    {self.engine:8.0f} tokens/s",
                f"trainer alone   {self.trainer:8.0f} tokens/s",
                f"together        {self.together:8.0f} tokens/s, {self.waited:.1%} of the time waiting for states",
                f"together / the slower one = {self.ratio:.3f}",
            ]
        )


def bench_online(
    request: TrainRequest,
    stream: AbstractContextManager[OnlineRequest],
    home: Path,
    scratch: Path,
    *,
    steps: int,
    core: int,
    rounds: int = 1,
) -> OnlineBenchReport:
    """Measure; takes one engine start.

    Args:
        request: training on the captured set of the same rows: what the trainer alone reads.
        stream: entered, it keeps one engine, without prefix caching, on its processor.
        core: the trainer's.
        rounds: measurements of each of the three.

    Raises:
        DataError: too few rows for so many steps.
        EngineError, CaptureError, TrainingError: a part failed.
    """
    shutil.rmtree(scratch, ignore_errors=True)
    request, found = quiet(request, WARM_UP + steps), []
    try:
        with stream as online:
            beside = request.model_copy(update={"states": "", "online": online})
            for number in range(rounds):
                alone, _ = trained(request, scratch / f"alone-{number}", home, core)
                streaming = streamed(online, steps * request.training.row_tokens, core)
                found.append((streaming, alone, *trained(beside, scratch / f"beside-{number}", home, core)))
            backend = online.capture.backend
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    engine, trainer, together, waited = (statistics.median(values) for values in zip(*found, strict=True))
    return OnlineBenchReport(
        engine=engine,
        trainer=trainer,
        together=together,
        ratio=together / min(engine, trainer),
        waited=waited,
        steps=steps,
        rounds=rounds,
        row_tokens=request.training.row_tokens,
        backend=backend,
    )


def quiet(request: TrainRequest, steps: int) -> TrainRequest:
    """What both trainings are told: nothing but steps, on one processor."""
    kept = request.training
    training = kept.model_copy(
        update={
            "epochs": 1000,
            "max_steps": steps,
            "threads": 1,
            "processes": 1,
            "log_every_steps": 1,
            "validation": kept.validation.model_copy(update={"every_steps": steps + 1, "max_rows": 1, "walk_rows": 0}),
            "checkpoint": kept.checkpoint.model_copy(update={"every_steps": None, "every_epoch": False}),
        }
    )
    return request.model_copy(update={"training": training})


def trained(request: TrainRequest, output: Path, home: Path, core: int) -> tuple[float, float]:
    """(tokens/s behind the warm-up, share of that time spent waiting) of one training."""
    run_training(request.model_copy(update={"output": str(output / "training")}), home, cores=(core,))
    lines = [line for line in read_metrics(output / "training" / METRICS) if line["kind"] == "train"]
    first, last = lines[WARM_UP - 1], lines[-1]
    seconds = last["time"] - first["time"]
    times = zip(lines[WARM_UP - 1 :], lines[WARM_UP:], strict=False)
    waited = sum(line["wait_share"] * (line["time"] - before["time"]) for before, line in times)
    return (last["tokens"] - first["tokens"]) / seconds, waited / seconds


def streamed(online: OnlineRequest, tokens: int, core: int) -> float:
    """Tokens/s that arrive at a reader on that processor, after a first window. DataError where there are too few."""
    from speculators_core.states.online import OnlineStates

    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        with closing(OnlineStates.open(online)) as states:
            positions = [position for position, split in enumerate(states.splits) if split == "train"]
            read, warm, started = 0, online.states.window_tokens, 0.0
            with states.expecting(positions):
                for position in positions:
                    read += int(states.row(position).hidden_states.shape[0])
                    if not started and read >= min(warm, tokens // 2):
                        read, started = 0, time.monotonic()
                    if started and read >= tokens:
                        return read / (time.monotonic() - started)
        raise DataError(f"the data set ends before {tokens} tokens have arrived", mend="lower --steps")
    finally:
        os.sched_setaffinity(0, allowed)
