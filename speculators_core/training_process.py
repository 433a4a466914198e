"""Training in a process of its own: started, followed, stopped, and its end told in the parent's words.

    python -m speculators_core.training_process request.json

is the child (itself under torchrun when the request asks for several processes). `training.request` lists the files
that it writes into the request's output directory; started again after a kill, it goes on from them.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from speculators_core import errors
from speculators_core.errors import DraftsmithError, Interrupted, StoreError, TrainingError
from speculators_core.processes import supervise
from speculators_core.training.request import METRICS, OUTCOME, RESULT, Outcome, TrainReport, TrainRequest, write_json
from speculators_core.types import ProgressCallback

log = logging.getLogger(__name__)

EXIT_INTERRUPTED = 75
"""Exit status after a signal: progress is saved, the same command goes on. (EX_TEMPFAIL of sysexits.)"""
_GRACE_S = 25
"""What a stop may take, for a step or a row of a validation and a checkpoint: whoever cancels waits 30 s at most."""


def run_training(
    request: TrainRequest, home: Path, progress: ProgressCallback | None = None, cores: Sequence[int] | None = None
) -> TrainReport:
    """Train in a supervised child, on these cores alone where they are given: it ends with us, and signals act on it.

    Raises:
        Interrupted, TrainingError, …: what the child says of its end.
        BudgetError: from `progress`; a checkpoint is saved first.
    """
    output = Path(request.output)
    name = output.parent.name
    request_file = home / "scratch" / "train" / f"{name[:16]}.json"
    write_json(request_file, request.model_dump_json(indent=1))
    log_file = home / "logs" / f"trainer-{time.strftime('%Y%m%d-%H%M%S')}-{name[:6]}.log"
    log.info("training log=%s", log_file)
    with supervise(train_command(request_file), name="trainer", home=home, log=log_file, cores=cores) as process:
        try:
            while process.poll() is None:
                if progress is not None and (reached := read_progress(output)) is not None:
                    progress(*reached)
                time.sleep(0.5)
        except BaseException:  # a signal in whatever shape, or the budget
            process.stop(grace_s=_GRACE_S)  # SIGTERM: it saves a checkpoint and goes
            raise
    return read_outcome(output)


def train_command(request_file: Path, *, python: str = sys.executable) -> list[str]:
    """The command that trains as asked in `request_file`; it ends with 0, EXIT_INTERRUPTED, or 1."""
    return [python, "-m", "speculators_core.training_process", str(request_file)]


def read_progress(output: Path) -> tuple[int, int] | None:
    """(steps done, steps in all) of a running process, from its last line of metrics; None before the first."""
    from speculators_core.training.callbacks.metrics_log import read_metrics

    lines = [line for line in read_metrics(output / METRICS) if line.get("kind") == "train"]
    return (int(lines[-1]["step"]), int(lines[-1]["total_steps"])) if lines else None


def read_outcome(output: Path) -> TrainReport:
    """The report of a training process that has ended, or the error that it ended with, raised here again."""
    try:
        outcome = Outcome.model_validate_json((output / OUTCOME).read_text())
    except (FileNotFoundError, ValidationError) as error:
        raise TrainingError(
            f"the training process ended without a word; {output / OUTCOME} does not tell why",
            mend="see its log (out of memory, or a full disk?), then start again: it goes on from its last checkpoint",
        ) from error
    if outcome.outcome == "finished":
        return TrainReport.model_validate_json((output / RESULT).read_text())
    kind = getattr(errors, outcome.error or "", TrainingError)
    assert isinstance(kind, type) and issubclass(kind, DraftsmithError)
    raise kind(outcome.what or "training failed", mend=outcome.mend)


def main(argv: Sequence[str]) -> int:
    """Child process: train, and leave `outcome.json`; several processes are launched by torchrun on this module."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    (request_file,) = argv
    request = TrainRequest.model_validate_json(Path(request_file).read_text())
    output = Path(request.output)
    if request.training.processes > 1 and "LOCAL_RANK" not in os.environ:
        return _launch(request_file, request)
    is_main = os.environ.get("RANK", "0") == "0"
    if is_main:
        (output / OUTCOME).unlink(missing_ok=True)
    try:
        from speculators_core.build import train

        train(request)
        outcome, status = Outcome(outcome="finished"), 0
    except DraftsmithError as error:
        stopped = isinstance(error, Interrupted)
        outcome = Outcome(
            outcome="interrupted" if stopped else "failed", error=type(error).__name__, what=error.what, mend=error.mend
        )
        status = EXIT_INTERRUPTED if stopped else 1
        log.error("%s", error)
    except BaseException as error:
        _leave(output, Outcome(outcome="failed", error="TrainingError", what=f"{type(error).__name__}: {error}"))
        raise
    if is_main or outcome.outcome == "failed":
        _leave(output, outcome)
    return status


def _launch(request_file: str, request: TrainRequest) -> int:
    """Run the ranks under torchrun in this process; signals reach them through it."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    output = Path(request.output)
    (output / OUTCOME).unlink(missing_ok=True)
    count = request.training.processes
    options = ["--standalone", f"--nproc-per-node={count}", f"--shutdown-timeout={_GRACE_S}"]
    try:
        torchrun([*options, "-m", "speculators_core.training_process", request_file])
    except (ChildFailedError, SignalException) as error:
        log.error("torchrun: %s", type(error).__name__)
    try:
        outcome = Outcome.model_validate_json((output / OUTCOME).read_text())
    except FileNotFoundError:
        return 1
    return {"finished": 0, "interrupted": EXIT_INTERRUPTED, "failed": 1}[outcome.outcome]


def _leave(output: Path, outcome: Outcome) -> None:
    """Tell whoever started us how it ended; where the disk is full, the log alone."""
    try:
        write_json(output / OUTCOME, outcome.model_dump_json(indent=1))
    except StoreError as error:
        log.error("%s; it would say: %s", error.what, outcome.model_dump_json())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
