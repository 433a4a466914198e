"""Parts of a capture for several engines at once; `capture` afterwards makes a set of what they left."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from speculators_core.data.rows import RowSet
from speculators_core.run import Run
from speculators_core.stages.expected import capture_estimate
from speculators_core.stages.states import capture_digest, require_same_rendering
from speculators_core.stages.streaming import station
from speculators_core.store import emptied
from speculators_core.types import ArtifactRef

if TYPE_CHECKING:
    from speculators_core.states.collect import Collector


def missing_shares(run: Run, dataset: ArtifactRef) -> tuple[int, ...]:
    """Engines of the recipe (by number) that have a part to capture; none where one is enough, or all is there.

    Raises:
        as `capture`, before anything expensive.
    """
    engines, recipe = len(run.recipe.hidden_states.engines), run.recipe
    answered = recipe.data.replies == "regenerate"  # its states come with the replies
    if engines == 1 or answered or recipe.capture.source != "engine":
        return ()
    key = capture_digest(run, dataset)
    with run.store.single_flight("states", key, shared=True):
        if run.store.find("states", key) is not None:
            return ()
        rows, workspace = RowSet.open(run.store.path(dataset)), run.store.workspace("states", key)
        return tuple(number for number in range(engines) if _plan(run, rows, workspace, number).missing())


def capture_share(run: Run, dataset: ArtifactRef, number: int, look: Callable[[], None]) -> int:
    """The part of one engine; the number of rows that were captured now. What `look` raises meanwhile ends it.

    Raises:
        BudgetError: it would take more than the recipe's budget has left, or has.
    """
    key = capture_digest(run, dataset)
    part = f"{key}-share-{number}"
    with (
        run.store.single_flight("states", key, shared=True, look=look),
        run.store.single_flight("states", part, look=look),  # another run's same part: one place, one engine
    ):
        if run.store.find("states", key) is not None:
            return 0
        rows, workspace = RowSet.open(run.store.path(dataset)), run.store.workspace("states", key)
        collector = _plan(run, rows, workspace, number)
        if not collector.missing():
            return 0
        tokens = collector.num_tokens // len(run.recipe.hidden_states.engines)
        with run.ledger.attempt("capture", part, lambda: capture_estimate(run, tokens).amount):
            return _capture(run, rows, collector, workspace, number, look)


def _capture(
    run: Run, rows: RowSet, collector: Collector, workspace: Path, number: int, look: Callable[[], None]
) -> int:
    from speculators_core.states import shares
    from speculators_core.states.capture import SHARE_NAME, context_for
    from speculators_core.states.stores import provided_store

    config, place = run.recipe.capture, emptied(workspace / SHARE_NAME.format(number))
    seat = run.recipe.hidden_states.engines[number]

    def progress(done: int, total: int) -> None:
        look()
        run.advance(done, total)

    try:
        with provided_store(config, collector.longest, collector.facts.bytes_per_token, run.home) as capture:
            return shares.capture_share(
                rows,
                collector,
                station(run, capture, seat, place, context_for(collector.longest, run.facts)),
                config,
                verifier_dir=run.verifier,
                home=run.home,
                check=lambda engine: require_same_rendering(run, rows, engine),
                look=look,
                progress=progress,
            ).rows
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _plan(run: Run, rows: RowSet, workspace: Path, number: int) -> Collector:
    from speculators_core.states.capture import plan_share

    share = (number, len(run.recipe.hidden_states.engines))
    return plan_share(rows, run.verifier, run.layer_ids, run.fingerprint.digest, run.recipe.capture, workspace, share)
