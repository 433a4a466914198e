"""Keeping a champion in step: measuring it on what is there now, and handing its weights to training."""

from __future__ import annotations

import logging

from pydantic import Field

from speculators_core.config import Recipe
from speculators_core.lifecycle.changes import Action, Proven, World
from speculators_core.lifecycle.matrix import Cell
from speculators_core.lifecycle.promotion import settle
from speculators_core.run import Run, WarmStart
from speculators_core.summary import LoopSummary
from speculators_core.types import ArtifactRef, StrictModel
from tasks.adapters.settings import settings
from tasks.judging import measure_version
from tasks.observe import flow_run_id
from tasks.planning import Situation, world_of
from tasks.policies import stage_task
from tasks.requests import BackfillRequest, UpkeepRequest
from tasks.runs import UPKEEP_DEPLOYMENT, ensure_run, void_own_run
from tasks.versions import fetch_draft, open_aliases, require_version

log = logging.getLogger(__name__)


class Incumbent(StrictModel):
    """What serves, measured on the verifier and runtime that are there now: what doing nothing would be."""

    version: str
    cell: Cell = Field(description="what the gate says of it here, with its acceptance length")
    holds: bool = Field(description="passed, and within the gate's margin of what it was registered with")


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
    version = settle(open_aliases(), recipe.deployment, runtime_key=run.runtime.key, home=run.home).version
    if version is None:
        return None
    cell = measure_version(run, recipe.deployment, version, dataset)
    proven = Proven.of_tags(version, open_aliases().tags(recipe.deployment, version))
    held, why = proven.holds(world_of(run), recipe.gate.margin)
    log.info("incumbent=%s state=%s al=%s: %s", version, cell.state, cell.al, why)
    return Incumbent(version=version, cell=cell, holds=bool(held))


@stage_task("warm-start")
def weights_to_start_from(recipe: Recipe, action: Action) -> WarmStart | None:
    """The champion's draft on disk, verified, where the action starts from it; None for random weights."""
    situation = Situation.of(recipe)
    found, version = situation.champion_start(head=action != "retrain-new-head"), situation.serving
    if found is None or version is None or action == "retrain-afresh":
        return None
    aliases = open_aliases()
    path, _ = fetch_draft(settings(), require_version(aliases, recipe.deployment, version), recipe.deployment, version)
    return found.model_copy(update={"path": str(path)})


def from_random_weights(recipe: Recipe) -> Recipe:
    """The recipe without a draft to start from: none fits any more."""
    return recipe.model_copy(update={"training": recipe.training.model_copy(update={"warm_start": None})})


@stage_task("decide", retries=0)
def decide_now(request: UpkeepRequest) -> tuple[Recipe, Action]:
    """The request's recipe and what is to be done: nothing where verifier or runtime is another than expected."""
    recipe = request.load()
    situation = Situation.of(recipe)
    if changed := changed_since(request, situation.world):
        log.info("the %s changed again since this run was asked for: another run sees to that", " and ".join(changed))
        if own := flow_run_id():
            void_own_run(own)
        return recipe, "nothing"
    action = situation.decision.action if request.action == "auto" else request.action
    log.info("action=%s because %s", action, "; ".join(situation.decision.reasons) or "it was asked for")
    return recipe, action


def changed_since(request: UpkeepRequest, world: World) -> list[str]:
    """Which of verifier and runtime is not the one that the request was made for."""
    found = {
        "verifier": (request.expected, world.verifier.digest),
        "runtime": (request.expected_runtime, world.runtime_key),
    }
    return [name for name, (expected, now) in found.items() if expected not in (None, now)]


@stage_task("start-runs")
def start_all(request: BackfillRequest) -> list[str]:
    """A run of the deployed upkeep for each of a backfill's requests; their ids."""
    parent = flow_run_id()
    started = [
        ensure_run(
            UPKEEP_DEPLOYMENT,
            f"backfill-{parent}-{number}",
            {"request": wanted.model_dump(mode="json")},
            ["backfill", f"parent:{parent}"],
        )
        for number, wanted in enumerate(request.requests())
    ]
    return [run.run_id for run in started]


def registry_exists() -> bool:
    """Whether there is a registry to ask: a local one is made by the first registration."""
    database = settings().sqlite_file
    return database is None or database.exists()
