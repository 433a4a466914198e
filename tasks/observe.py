"""What a stage shows while it works: a child run in MLflow, progress in Prefect, a line in the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from prefect.artifacts import create_markdown_artifact, create_progress_artifact, update_progress_artifact
from prefect.context import FlowRunContext

from speculators_core.config import Recipe
from speculators_core.errors import BudgetError, RegistryError
from speculators_core.lifecycle.budget import Amount
from speculators_core.run import NotProduced, Run, StageResult
from tasks.adapters.follow import follow_metrics
from tasks.adapters.redaction import redact
from tasks.adapters.settings import settings
from tasks.adapters.tracking import DatasetFacts, StageRun, Tracking
from tasks.events import BudgetExceeded

log = logging.getLogger(__name__)

LOG_EVERY_S = 10.0
SHOW_EVERY_S = 2.0

StageCall = Callable[[Run], StageResult]


@cache
def tracking() -> Tracking:
    """This process's way into MLflow."""
    return Tracking(settings())


@cache
def parent_run(recipe_digest: str, name: str) -> str:
    """MLflow's parent run of a recipe, reopened once a process."""
    return tracking().open_parent(recipe_digest, name=name, tags={"prefect.flow_run_id": flow_run_id()})


def flow_run_id() -> str | None:
    """Id of the Prefect flow run that we are in, if any."""
    context = FlowRunContext.get()
    return str(context.flow_run.id) if context and context.flow_run else None


def observed(
    recipe: Recipe, name: str, call: StageCall, *, follow: str | None = None, files: Sequence[str] = ()
) -> StageResult:
    """Run a stage, or find it in the store; a stage that works gets a child run and a progress artifact.

    Args:
        follow: file name in the stage's workspace whose metrics go to the child run while the stage works.
        files: patterns of the result's files that the child run keeps too.
    """
    try:
        return call(Run(recipe, settings().home, only_look=True))
    except NotProduced:
        pass
    parent = parent_run(recipe.digest(), recipe.name)
    with tracking().stage(parent, name, tags={"prefect.flow_run_id": flow_run_id()}) as child:
        progress = Progress(name)
        run = Run(recipe, settings().home, progress=progress, watch=follower(child, follow))
        try:
            with kept_cost(run, child):
                result = call(run)
        except BudgetError as error:
            told = BudgetExceeded(deployment=recipe.deployment, version=None, recipe=recipe.name, reasons=(error.what,))
            told.emit(f"{recipe.digest()} {error.what}")
            raise
        for file in found_files(run.store.path(result.ref), files):
            child.files(file)
        child.params({"stage": name, "key": result.ref.uri.rsplit("/", 1)[-1]})
        child.inputs([DatasetFacts(name=k, digest=d, context=name, uri=d, kind=k) for k, d in result.inputs.items()])
        child.metrics({"seconds": result.seconds, **numbers(result.summary)})
        child.json("summary.json", result.summary)
    show_summary(name, result, next(iter(found_files(run.store.path(result.ref), ["report.md"])), None))
    return result


@contextmanager
def kept_cost(run: Run, child: StageRun) -> Iterator[None]:
    """Keep what the block takes with the stage's run, also where it fails, and all of it with the recipe's."""
    before = run.ledger.spent()

    def note() -> None:
        child.metrics(cost_metrics(run, run.ledger.spent().less(before)))
        note_total_cost(run)

    try:
        yield
    except BaseException:
        with suppress(RegistryError):  # the stage's own error matters more
            note()
        raise
    note()


def note_total_cost(run: Run) -> None:
    """Keep with the recipe's run what all its stages have taken so far."""
    parent = parent_run(run.recipe.digest(), run.recipe.name)
    tracking().handle(parent).metrics(cost_metrics(run, run.ledger.spent()))


def cost_metrics(run: Run, amount: Amount) -> dict[str, float]:
    """Time, tokens, bytes of hidden states and, where the recipe has a price, money."""
    found = {"cost.seconds": amount.seconds, "cost.tokens": amount.tokens, "cost.bytes": amount.num_bytes}
    return found if run.recipe.lifecycle.price_per_hour is None else {**found, "cost.price": amount.cost}


def found_files(directory: Path, patterns: Sequence[str]) -> list[Path]:
    """Files of a result by pattern, in order."""
    return [file for pattern in patterns for file in sorted(directory.glob(pattern))]


def follower(child: StageRun, file: str | None) -> Callable[[Path], AbstractContextManager[Any]] | None:
    """What the stage enters around its work, so that a file of its workspace is followed into MLflow."""
    if file is None:
        return None
    return lambda workspace: follow_metrics(workspace / file, child)


class TimeLeft:
    """Seconds left, from the pace since the first look: what was done by then, or a start-up, is no part of it."""

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None
        self._latest = (0.0, 0)

    def __call__(self, now: float, done: int, total: int) -> float | None:
        """From `done` of `total` at second `now`; None before anything was done."""
        if self._first is None:
            self._first = self._latest = (now, done)
        if done != self._latest[1]:
            self._latest = (now, done)
        (began, before), (moved, done) = self._first, self._latest
        if done <= before:
            return None
        return max((total - done) * (moved - began) / (done - before) - (now - moved), 0.0)


class Progress:
    """Shows (done, total) in Prefect's UI and, less often, in the log."""

    def __init__(self, stage: str) -> None:
        self.stage = stage
        self._artifact: Any = None
        self._left = TimeLeft()
        self._shown = self._logged = 0.0
        self._ended = False

    def __call__(self, done: int, total: int) -> None:
        """Note progress; cheap when called often."""
        now = time.monotonic()
        share = done / total if total else 1.0
        left = self._left(now, done, total)
        last = done >= total and not self._ended
        self._ended = done >= total
        if self._ended and not last:
            return
        if now - self._logged >= LOG_EVERY_S or last:
            self._logged = now
            told = "" if left is None else f", about {left:.0f} s left"
            log.info("stage=%s progress=%d/%d (%.0f %%)%s", self.stage, done, total, 100 * share, told)
        if now - self._shown >= SHOW_EVERY_S or last:
            self._shown = now
            self._show(100 * share)

    def _show(self, percent: float) -> None:
        if FlowRunContext.get() is None:
            return
        if self._artifact is None:
            self._artifact = create_progress_artifact(progress=percent, key=f"progress-{self.stage}")
        else:
            update_progress_artifact(artifact_id=self._artifact, progress=percent)


def show_summary(name: str, result: StageResult, report: Path | None) -> None:
    """The stage's own report, or else its numbers, as a Markdown artifact in Prefect's UI."""
    if FlowRunContext.get() is None:
        return
    if report is not None:
        create_markdown_artifact(redact(report.read_text(encoding="utf-8")), key=f"stage-{name}")
        return
    lines = [f"## {name}", "", f"took {result.seconds:.1f} s", "", "| | |", "|---|---|"]
    lines += [f"| {key} | {value:g} |" for key, value in numbers(result.summary).items()]
    create_markdown_artifact("\n".join(lines), key=f"stage-{name}")


def numbers(summary: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Numeric leaves of a summary, by dotted name."""
    found: dict[str, float] = {}
    for key, value in summary.items():
        if isinstance(value, Mapping):
            found.update(numbers(value, f"{prefix}{key}."))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[f"{prefix}{key}"] = float(value)
    return found
