"""Parts of a capture for several engines at once; `capture` afterwards makes a set of what they left."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from speculators_core.data.rows import RowSet
from speculators_core.run import Run
from speculators_core.stages.states import capture_digest, require_same_rendering
from speculators_core.stages.streaming import station
from speculators_core.types import ArtifactRef


def missing_shares(run: Run, dataset: ArtifactRef) -> tuple[int, ...]:
    """Engines of the recipe (by number) that have a part to capture; none where one is enough, or all is there.

    Raises:
        as `capture`, before anything expensive.
    """
    engines, recipe = len(run.recipe.hidden_states.engines), run.recipe
    answered = recipe.data.replies == "regenerate"  # its states come with the replies
    if engines == 1 or answered or recipe.capture.source != "engine":
        return ()
    if run.store.find("states", capture_digest(run, dataset)) is not None:
        return ()
    from speculators_core.states.capture import plan_share

    rows, workspace = RowSet.open(run.store.path(dataset)), workspace_of(run, dataset)
    return tuple(
        number
        for number in range(engines)
        if plan_share(rows, run.verifier, run.layer_ids, run.fingerprint.digest, recipe.capture, workspace,
                      (number, engines)).missing()
    )  # fmt: skip


def capture_share(run: Run, dataset: ArtifactRef, number: int, look: Callable[[], None]) -> int:
    """The part of one engine; the number of rows that were captured now. What `look` raises meanwhile ends it."""
    from speculators_core.states import shares
    from speculators_core.states.capture import context_for, plan_share
    from speculators_core.states.stores import provided_store

    engines, config = run.recipe.hidden_states.engines, run.recipe.capture
    rows, workspace = RowSet.open(run.store.path(dataset)), workspace_of(run, dataset)
    share = (number, len(engines))
    collector = plan_share(rows, run.verifier, run.layer_ids, run.fingerprint.digest, config, workspace, share)
    place = workspace / f".share-{number}"
    try:
        with provided_store(config, collector.longest, collector.facts.bytes_per_token, run.home) as capture:
            return shares.capture_share(
                rows,
                collector,
                station(run, capture, engines[number], place, context_for(collector.longest, run.facts)),
                config,
                verifier_dir=run.verifier,
                home=run.home,
                check=lambda engine: require_same_rendering(run, rows, engine),
                look=look,
            ).rows
    finally:
        shutil.rmtree(place, ignore_errors=True)


def workspace_of(run: Run, dataset: ArtifactRef) -> Path:
    """Where `capture` goes on."""
    return run.store.workspace("states", capture_digest(run, dataset))
