"""Keeping a champion in step: measuring it on what is there now, and handing its weights to training."""

from __future__ import annotations

import logging

from pydantic import Field

from speculators_core.config import Recipe
from speculators_core.lifecycle.changes import Action
from speculators_core.lifecycle.matrix import Cell
from speculators_core.lifecycle.promotion import settle
from speculators_core.run import Run, WarmStart
from speculators_core.summary import LoopSummary
from speculators_core.types import ArtifactRef, StrictModel
from tasks.adapters.settings import settings
from tasks.planning import Situation
from tasks.policies import stage_task
from tasks.release import measure_version
from tasks.versions import fetch_draft, open_aliases, require_version

log = logging.getLogger(__name__)


class Incumbent(StrictModel):
    """What serves, measured on the verifier and runtime that are there now: what doing nothing would be."""

    version: str
    cell: Cell = Field(description="what the gate says of it here, with its acceptance length")


class Upkeep(StrictModel):
    """What an action came to."""

    action: Action
    incumbent: Incumbent | None = Field(description="None where nothing served")
    kept: bool = Field(description="whether the incumbent was good enough, so that nothing was trained")
    loop: LoopSummary | None = Field(description="the loop that trained another draft; None where none was trained")

    def describe(self) -> str:
        """What happened, in a line."""
        measured = ""
        if self.incumbent is not None:
            al = self.incumbent.cell.al
            measured = f"version {self.incumbent.version} is {self.incumbent.cell.state} here" + (
                "" if al is None else f" (AL {al:.3f})"
            )
        if self.loop is None:
            return f"{measured}: it goes on serving" if self.kept else "nothing to do"
        gate = self.loop.gate
        return f"{measured}{'; ' if measured else ''}trained version {self.loop.registry.version}: {gate.outcome}"


@stage_task("measure-incumbent")
def measure_incumbent(recipe: Recipe, dataset: ArtifactRef) -> Incumbent | None:
    """Measure what serves on the recipe's verifier and runtime, and fill that cell of the matrix."""
    run = Run(recipe, settings().home)
    if not registry_exists():
        return None
    version = settle(open_aliases(), recipe.deployment, pair=None, home=run.home).version
    if version is None:
        return None
    cell = measure_version(run, recipe.deployment, version, dataset)
    log.info("incumbent=%s state=%s al=%s", version, cell.state, cell.al)
    return Incumbent(version=version, cell=cell)


@stage_task("warm-start")
def weights_to_start_from(recipe: Recipe, action: Action) -> WarmStart | None:
    """The champion's draft on disk, verified, where the action starts from it; None for random weights."""
    situation = Situation.of(recipe)
    found = situation.warm_start(action)
    if found is None or situation.proven is None:
        return None
    aliases, version = open_aliases(), situation.proven.version
    path, _ = fetch_draft(settings(), require_version(aliases, recipe.deployment, version), recipe.deployment, version)
    return found.model_copy(update={"path": str(path)})


def registry_exists() -> bool:
    """Whether there is a registry to ask: a local one is made by the first registration."""
    database = settings().sqlite_file
    return database is None or database.exists()
