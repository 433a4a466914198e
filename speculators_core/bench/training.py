"""Training speed, memory and loss beside the peer's (speculators 0.9.0): same states, rows, order, dtype and threads.

Both train in child processes that alternate. tokens/s counts non-padding tokens, loading included, from the end of the
warm-up steps to the end of the last; the median of the runs is reported. Memory is peak anonymous memory of the
training process above its level after imports (the peer's loader process is left out, in the peer's favour). Losses of
both are measured by our own validation of the weights that each ended with.
"""

from __future__ import annotations

import json
import logging
import shutil
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from speculators_core.bench.cases import case
from speculators_core.bench.peer import prepare_peer
from speculators_core.bench.setup import BenchSettings, batches_of, build_model, request_of, rows_of
from speculators_core.drafts import algorithm_of
from speculators_core.errors import ConfigError, TrainingError
from speculators_core.processes import supervise
from speculators_core.training.callbacks.base import Callback
from speculators_core.training.request import TrainRequest
from speculators_core.types import StrictModel

if TYPE_CHECKING:
    from torch import Tensor

    from speculators_core.training.loader import PackedRows
    from speculators_core.training.trainer import StepReport, Trainer

log = logging.getLogger(__name__)


class Side(StrictModel):
    """One of the two trainers."""

    tokens_per_s: float = Field(description="median over the runs")
    runs: tuple[float, ...] = Field(description="tokens/s of each run")
    peak_memory_mib: float = Field(description="largest rise of anonymous memory over the runs")
    loss: float = Field(description="our validation loss of its final weights")
    eal: float | None = Field(description="our walked acceptance length of its final weights")


class BenchReport(StrictModel):
    """Both sides, and ours as a multiple of the peer's."""

    steps: int = Field(description="optimiser steps of a run")
    warmup_steps: int = Field(description="steps before the clock starts")
    row_tokens: int = Field(description="tokens of a packed row")
    draft_vocabulary: int = Field(description="D")
    threads: int = Field(description="torch threads of each side")
    ours: Side
    peer: Side
    speed_ratio: float = Field(description="our tokens/s over the peer's; more is better")
    memory_ratio: float = Field(description="our peak memory over the peer's; less is better")
    loss_ratio: float = Field(description="our loss over the peer's; less is better")

    def table(self) -> str:
        """The report for people."""
        lines = [f"{'':14}{'tokens/s':>10}{'peak MiB':>10}{'val. loss':>11}{'walked EAL':>12}"]
        for name, side in (("draftsmith", self.ours), ("peer", self.peer)):
            eal = "-" if side.eal is None else f"{side.eal:.3f}"
            lines.append(f"{name:14}{side.tokens_per_s:>10.0f}{side.peak_memory_mib:>10.0f}{side.loss:>11.4f}{eal:>12}")
        ratios = f"{self.speed_ratio:>9.2f}x{self.memory_ratio:>9.2f}x{self.loss_ratio:>10.3f}x"
        return "\n".join([*lines, f"{'ours / peer':14}{ratios}"])


class Measured(StrictModel):
    """One run of one side."""

    tokens_per_s: float = Field(description="non-padding tokens a second after the warm-up steps, loading included")
    rise: int = Field(description="peak anonymous memory above its level after imports, in bytes")


@dataclass(frozen=True)
class Pair:
    """Both trainers, told the same: what they read, in which order, and where each leaves its weights."""

    settings: BenchSettings
    request: TrainRequest
    rows: PackedRows
    tokens: tuple[int, ...]  # of each step
    commands: Mapping[str, Sequence[str]]
    workspace: Path

    @classmethod
    def prepare(cls, settings: BenchSettings, peer_python: Path, workspace: Path) -> Pair:
        """Write the jobs and the peer's copy of the states, which is reused where it is whole.

        Args:
            peer_python: interpreter of an environment with speculators 0.9.0 (and no torchvision).
            workspace: scratch for the peer's copy of the states, jobs and weights; kept.
        """
        workspace.mkdir(parents=True, exist_ok=True)
        request = request_of(settings, workspace / "ours")
        rows = rows_of(request)
        batches = batches_of(rows, request.training, settings.steps)
        our_job = workspace / "ours.json"
        told = {"settings": settings.model_dump(mode="json"), "output": str(workspace / "ours")}
        our_job.write_text(json.dumps(told))
        commands = {"ours": (sys.executable, "-m", "speculators_core.bench.training", str(our_job))}
        if flags := case(settings.case).peer:
            peer_job = prepare_peer(settings, flags, request, batches, workspace)
            child = str(Path(__file__).parent / "peer_child.py")
            # -E: a PYTHONPATH with our hs_connectors would hide the peer's, which has the same name
            commands["peer"] = (str(peer_python), "-E", child, str(peer_job))
        tokens = tuple(sum(rows.lengths[row] for row in batch) for batch in batches)
        return cls(settings, request, rows, tokens, commands, workspace)

    def run(self, side: str, timeout_s: float) -> Measured:
        """Train one side once. TrainingError when its process failed, with the tail of its log."""
        for left in ("ours", "peer-run"):  # what a killed run left there would be gone on with
            shutil.rmtree(self.workspace / left, ignore_errors=True)
        result = _run(self.commands[side], self.workspace / f"{side}-result.json", self.settings, timeout_s)
        first, last = self.settings.warmup_steps, self.settings.steps
        seconds = result["times"][last - 1] - result["times"][first - 1]
        return Measured(tokens_per_s=sum(self.tokens[first:last]) / seconds, rise=result["rise"])

    def side(self, side: str, runs: Sequence[Measured]) -> Side:
        """A side's figures over its runs, and our validation of the weights that its last run ended with."""
        return _side(runs, self.request, self.rows, self.workspace / f"{side}-weights")

    def draft(self, side: str) -> Path:
        """The trained draft as a directory that vLLM serves: the peer's as it saved it, ours as we export it."""
        directory = self.workspace / f"{side}-weights"
        return directory if side == "peer" else _export_ours(self.request, directory, self.workspace / "ours-draft")


def bench_training(
    peer_python: Path, workspace: Path, settings: BenchSettings, *, timeout_s: float = 1800
) -> BenchReport:
    """Train both in turns and compare; arguments as in `Pair.prepare`.

    Raises:
        ConfigError: the peer has no such training.
        TrainingError: a child failed; its log's tail is quoted.
    """
    if case(settings.case).peer is None:
        raise ConfigError(f"the peer does not train {settings.case} here", mend="compare another case")
    pair = Pair.prepare(settings, peer_python, workspace)
    runs: dict[str, list[Measured]] = {"ours": [], "peer": []}
    for run in range(settings.runs):
        for side, measured in runs.items():
            measured.append(pair.run(side, timeout_s))
            log.info("bench run=%d side=%s tokens_per_s=%.0f", run, side, measured[-1].tokens_per_s)
    ours, peer = (pair.side(side, measured) for side, measured in runs.items())
    return BenchReport(
        steps=settings.steps,
        warmup_steps=settings.warmup_steps,
        row_tokens=settings.row_tokens,
        draft_vocabulary=settings.draft_vocabulary,
        threads=settings.threads,
        ours=ours,
        peer=peer,
        speed_ratio=ours.tokens_per_s / peer.tokens_per_s,
        memory_ratio=ours.peak_memory_mib / peer.peak_memory_mib,
        loss_ratio=ours.loss / peer.loss,
    )


def _run(command: Sequence[str], result: Path, settings: BenchSettings, timeout_s: float) -> dict[str, Any]:
    result.unlink(missing_ok=True)
    log_file = result.with_suffix(".log")
    log_file.unlink(missing_ok=True)
    threads = str(settings.threads)
    environment = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    with supervise(
        command, name="bench", home=result.parent, log=log_file, env=environment, timeout_s=timeout_s
    ) as child:
        status = child.wait()
    if status != 0 or not result.is_file():
        tail = "\n".join(log_file.read_text().splitlines()[-12:])
        raise TrainingError(
            f"{Path(command[0]).name} {' '.join(command[1:3])} ended with {status}:\n{tail}",
            mend=f"see {log_file}; the peer needs speculators 0.9.0 and no torchvision in its environment",
        )
    content: dict[str, Any] = json.loads(result.read_text())
    return content


def _export_ours(request: TrainRequest, weights: Path, target: Path) -> Path:
    import safetensors.torch

    from speculators_core.formats.card import ModelCard
    from speculators_core.formats.directory import write_draft
    from speculators_core.training.weights import load_trained_tensors

    algorithm, settings = algorithm_of(request.algorithm)
    model, _ = build_model(request)
    load_trained_tensors(model, safetensors.torch.load_file(weights / "model.safetensors"))
    return write_draft(target, algorithm.export(settings, model, request.verifier), ModelCard(title="bench"))


def _side(runs: Sequence[Measured], request: TrainRequest, rows: PackedRows, weights: Path) -> Side:
    import torch

    from speculators_core.training.distributed import World
    from speculators_core.training.validation import Validator
    from speculators_core.training.weights import start_from

    torch.set_num_threads(request.training.threads or 1)
    model, _ = build_model(request)
    start_from(model, weights, additions=algorithm_of(request.algorithm)[0].additions)
    world = World(0, 1, torch.device("cpu"))
    held_out = rows_of(request, "validation")
    validator = Validator(held_out, rows.objective, request.training.validation, world)
    report = validator(model, torch.autocast("cpu", torch.bfloat16))
    return Side(
        tokens_per_s=round(statistics.median(run.tokens_per_s for run in runs), 1),
        runs=tuple(round(run.tokens_per_s, 1) for run in runs),
        peak_memory_mib=round(max(run.rise for run in runs) / 2**20, 1),
        loss=report.loss,
        eal=report.eal,
    )


# ------------------------------------------------------------------------------------------------ our child process


class _NoteTimes(Callback):
    """When each optimiser step ended."""

    name = "note_times"

    def __init__(self) -> None:
        self.times: list[float] = []
        self.processor: list[float] = []

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        self.times.append(time.perf_counter())
        self.processor.append(time.process_time())


def _train_ours(job: dict[str, Any]) -> None:
    import safetensors.torch
    import torch

    from speculators_core.bench.anonymous_memory import PeakAnonymousMemory
    from speculators_core.training.callbacks.metrics_log import MetricsLog
    from speculators_core.training.distributed import World
    from speculators_core.training.trainer import Trainer
    from speculators_core.training.weights import trained_tensors

    settings = BenchSettings.model_validate(job["settings"])
    output = Path(job["output"])
    torch.set_num_threads(settings.threads)
    kind = case(settings.case).ours["kind"]
    for name in (f"algorithms.{kind}.build", f"algorithms.{kind}.objective", "states.sets"):  # loaded lazily otherwise
        import_module(f"speculators_core.{name}")
    memory = PeakAnonymousMemory()
    request = request_of(settings, output)
    model, _ = build_model(request)
    rows, times = rows_of(request), _NoteTimes()
    told = MetricsLog(output / "metrics.jsonl", request.training.log_every_steps)
    world = World(0, 1, torch.device("cpu"))
    Trainer(model, rows.objective, rows, request.training, world=world, output=output, callbacks=(told, times)).fit()
    memory.stop()
    weights = output.parent / "ours-weights" / "model.safetensors"
    weights.parent.mkdir(exist_ok=True)
    tensors: dict[str, Tensor] = {name: value.contiguous() for name, value in trained_tensors(model).items()}
    safetensors.torch.save_file(tensors, weights)
    result = {"times": times.times, "processor": times.processor, "rise": memory.rise, "level": memory.level}
    (output.parent / "ours-result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    _train_ours(json.loads(Path(sys.argv[1]).read_text()))
