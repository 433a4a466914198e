"""Plans from a recipe, the store and the registry; and why a draft is stale. Imports neither Prefect nor MLflow.

Nothing is made: the stages only look for what is there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from pydantic import Field, ValidationError

from speculators_core.config import Recipe, validate
from speculators_core.data.prepare import digest_sources
from speculators_core.engine.runtime import Runtime, probe_runtime
from speculators_core.errors import ConfigError, PlanError, RegistryError
from speculators_core.lifecycle.budget import excess
from speculators_core.lifecycle.changes import (
    TOKENIZER_TAG,
    Action,
    Decision,
    OnChange,
    Proven,
    World,
    decide_action,
)
from speculators_core.lifecycle.config import GateConfig
from speculators_core.lifecycle.drift import Incident, read_incident
from speculators_core.lifecycle.matrix import FINGERPRINT_TAG, GATE_TAG, RUNTIME_TAG
from speculators_core.lifecycle.plan import Facts, Plan, moved
from speculators_core.lifecycle.promotion import CHAMPION, audit_log, may_follow, served_by
from speculators_core.run import Run, WarmStart
from speculators_core.types import StrictModel
from speculators_core.verifier.difference import PartChange, difference
from speculators_core.verifier.fingerprint import Description, describe_location, recall
from tasks.adapters.registry_view import ModelView, look
from tasks.adapters.settings import settings
from tasks.planner import Champion, Planner
from tasks.verifier_tags import REVISION_TAG, VERIFIER_TAG, template_kwargs_of
from tasks.warm_start import began_from, recipe_start

log = logging.getLogger(__name__)

DRAFT_TAG, ALGORITHM_TAG = "draft.digest", "algorithm"


@dataclass(frozen=True)
class Situation:
    """A recipe against what is there now: the verifier, the runtime, and what serves."""

    run: Run
    view: ModelView

    @classmethod
    def of(cls, recipe: Recipe) -> Situation:
        """Read the registry; all else is read when it is asked for."""
        run = Run(recipe, settings().home, only_look=True, check=False)
        return cls(run, look(settings(), recipe.deployment))

    @cached_property
    def world(self) -> World:
        """What a draft would be made for and measured on now."""
        return world_of(self.run)

    @cached_property
    def serving(self) -> str | None:
        """The version that serves."""
        return serving_version(self.view, self.run.home, lambda: self.run.runtime.key)

    @cached_property
    def proven(self) -> Proven | None:
        """What the champion was proven on; None where nothing serves."""
        version = self.serving
        return None if version is None else proven_version(self.view, version, self.before)

    @cached_property
    def before(self) -> Description | None:
        """The champion's verifier as it was, where this state root has seen it."""
        version = self.serving
        digest = self.view.tags[version].get(FINGERPRINT_TAG) if version else None
        return recall(digest, self.run.home) if digest else None

    @property
    def incident(self) -> Incident | None:
        """The fall of served acceptance that `watch` has seen, until it is over."""
        return read_incident(self.run.home, self.run.recipe.deployment, self.serving)

    @cached_property
    def decision(self) -> Decision:
        """What changed, and the action that follows by the recipe's table."""
        recipe, world = self.run.recipe, self.world
        tried = tried_version(self.view, self.serving, world)
        return decide_action(
            self.proven,
            world,
            recipe.lifecycle.on_change,
            margin=recipe.gate.margin,
            tried=tried,
            incident=self.incident,
        )

    @property
    def details(self) -> tuple[PartChange, ...]:
        """What changed in the verifier, line by line; empty where its earlier state was never seen here."""
        if self.before is None or not self.decision.parts:
            return ()
        return difference(self.before, self.run.description)

    @cached_property
    def facts(self) -> Facts:
        """What a plan is good for."""
        run = self.run
        return Facts(
            verifier=run.fingerprint.digest,
            parts=run.fingerprint.parts,
            runtime=run.runtime.key,
            vllm=run.runtime.vllm,
            sources=digest_sources(run.recipe.data.sources, home=run.home),
            champion=self.serving,
        )

    def start(self, action: Action) -> WarmStart | None:
        """What training would begin from: the champion where the action says so, else what the recipe names."""
        if action == "retrain-afresh" and self.proven is not None:
            return None
        named = self.run.recipe.training.warm_start
        if named == CHAMPION or action in ("re-evaluate", "retrain", "retrain-new-head"):
            return self.champion_start(head=action != "retrain-new-head")
        return recipe_start(self.run.recipe)

    def champion_start(self, *, head: bool) -> WarmStart | None:
        """The champion's weights, not fetched; None where they are of another algorithm than the recipe's."""
        tags = self.view.tags.get(self.serving or "", {})
        if tags.get(ALGORITHM_TAG) != self.run.recipe.algorithm["kind"] or DRAFT_TAG not in tags:
            return None
        same_tokens = tags.get(TOKENIZER_TAG) == self.run.fingerprint.parts["tokenizer"]
        return WarmStart(digest=tags[DRAFT_TAG], path=None, head=head and same_tokens, before=began_from(tags))


def serving_version(view: ModelView, home: Path, runtime_key: Callable[[], str]) -> str | None:
    """What serves by promotion's rules: `champion`, or what served before other hands moved it to an unproven version.

    Only looks: following such a move, and writing it down, is `promotion.settle`'s business.

    Args:
        runtime_key: of the runtime at hand; asked for only where other hands have moved the alias.
    """
    champion = view.version_of(CHAMPION)
    ours = served_by(audit_log(home, view.model))
    if champion is None or champion == ours:
        return ours if ours in view.tags else None
    if may_follow(view.tags[champion], ours, runtime_key=runtime_key())[0]:
        return champion
    return ours if ours in view.tags else None


def tried_version(view: ModelView, champion: str | None, world: World) -> str | None:
    """The newest other version that was trained for this verifier and runtime and judged; None where there is none."""
    here = (world.verifier.digest, world.runtime_key)
    judged = [
        version
        for version, tags in view.tags.items()
        if version != champion and (tags.get(FINGERPRINT_TAG), tags.get(RUNTIME_TAG)) == here and GATE_TAG in tags
    ]
    return max(judged, key=int, default=None)


def world_of(run: Run) -> World:
    """Verifier and runtime of a run, as a registered version keeps them (`changes.tags_of`)."""
    return World(
        verifier=run.fingerprint, shape=run.description.shape, runtime_key=run.runtime.key, runtime=run.runtime
    )


def proven_version(view: ModelView, version: str, before: Description | None) -> Proven:
    """What a version was proven on, from its tags and, where those are old, from what this state root remembers."""
    found = Proven.of_tags(version, view.tags[version])
    if before is None:
        return found
    parts = {**before.fingerprint.parts, **found.parts}
    return found.model_copy(update={"parts": parts, "shape": found.shape or before.shape})


def make_plan(recipe: Recipe) -> Plan:
    """What the recipe asks for now, stage by stage.

    Raises:
        VerifierError, EngineError, DataError, RegistryError: verifier, runtime, sources or registry cannot be read.
    """
    situation = Situation.of(recipe)
    decision = situation.decision
    start = situation.start(decision.action)
    planner = planner_of(situation, start)
    planned = planner.stages(decision.action)
    notes = []
    if planner.borrows:
        notes.append(
            "this recipe's data are not prepared yet: tokens, bytes and time are those of the data that were prepared "
            "last here; `draftsmith prepare` counts its own"
        )
    if decision.action == "nothing" and situation.proven is not None:
        others = [stage.name for stage in planner_of(situation, start).loop()[:-1] if not stage.done]
        if others:
            notes.append(
                f"this recipe and its data would make another draft than the champion ({', '.join(others)} would run); "
                "`draftsmith retrain` makes it"
            )
    surely = sum((stage.amount for stage in planned if stage.state == "run"), situation.run.ledger.spent())
    if over := excess(recipe.budget, surely):
        notes.append(f"the budget will not do, with what was spent already: {'; '.join(over)}")
    if start is None and decision.action in ("re-evaluate", "retrain", "retrain-new-head"):
        notes.append("training would start from random weights: the champion is of another algorithm")
    return Plan(
        recipe=recipe.model_dump(mode="json"),
        deployment=recipe.deployment,
        facts=situation.facts,
        action=decision.action,
        changes=decision.changes,
        reasons=decision.reasons,
        details=situation.details,
        warm_start=situation.serving if start and decision.action != "nothing" else None,
        stages=planned,
        notes=tuple(notes),
    )


def read_plan(path: Path) -> tuple[Plan, Recipe]:
    """A written plan and its recipe. ConfigError where it is none."""
    try:
        plan = Plan.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        told = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(
            f"no plan can be read at {path}: {told}", mend="`draftsmith plan RECIPE` writes one, and says where"
        ) from error
    except ValidationError as error:
        raise ConfigError(
            f"{path} is not a plan of this version: {error.errors()[0]['msg']}",
            mend="write one with `draftsmith plan RECIPE --out FILE`",
        ) from error
    return plan, validate(Recipe, plan.recipe, where=str(path))


def require_same_world(plan: Plan, recipe: Recipe) -> Situation:
    """Refuse a plan whose world is another by now.

    Raises:
        PlanError: names what moved.
    """
    situation = Situation.of(recipe)
    if changes := moved(plan.facts, situation.facts):
        raise PlanError(
            f"the world has moved since the plan was made: {'; '.join(changes)}",
            mend="make a new plan with `draftsmith plan`, look at it, and apply that",
        )
    return situation


def explain_model(model: str, runtime: Runtime) -> Staleness:
    """Say whether a registered model's champion is stale: its verifier where its tags have it, on this runtime.

    Raises:
        ConfigError: there is no such model.
        RegistryError: nothing of it serves, or its tags do not name a verifier.
        VerifierError, EngineError: verifier or runtime cannot be read.
    """
    view, home = look(settings(), model), settings().home
    version = serving_version(view, home, lambda: probe_runtime(runtime, home=home).key)
    if not view.tags:
        raise ConfigError(f"no model {model!r} is registered", mend="name a recipe, or a model that `make ui` shows")
    if version is None:
        raise RegistryError(
            f"nothing of {model} serves: it has versions {', '.join(view.tags)}", mend="promote one of them first"
        )
    tags = view.tags[version]
    if VERIFIER_TAG not in tags:
        raise RegistryError(f"{model} version {version} does not say where its verifier lies", mend="name a recipe")
    before = recall(tags.get(FINGERPRINT_TAG, ""), home)
    kwargs = template_kwargs_of(tags, model, version)
    after = describe_location(tags[VERIFIER_TAG], revision=tags.get(REVISION_TAG), home=home, template_kwargs=kwargs)
    info = probe_runtime(runtime, home=home)
    world = World(verifier=after.fingerprint, shape=after.shape, runtime_key=info.key, runtime=info)
    proven, tried = proven_version(view, version, before), tried_version(view, version, world)
    decision = decide_action(proven, world, OnChange(), margin=GateConfig().margin, tried=tried)
    details = difference(before, after) if before is not None and decision.parts else ()
    return staleness(model, version, decision, details)


def staleness(model: str, version: str | None, decision: Decision, details: tuple[PartChange, ...]) -> Staleness:
    """What a decision says of a champion."""
    return Staleness(
        deployment=model,
        version=version,
        stale=version is not None and decision.action != "nothing",
        action=decision.action,
        reasons=decision.reasons,
        details=details,
    )


def planner_of(situation: Situation, start: WarmStart | None) -> Planner:
    """A planner of what happens in a situation when training begins from `start`."""
    tags = situation.view.tags.get(situation.serving or "", {})
    champion = Champion(version=situation.serving, draft=tags.get(DRAFT_TAG)) if situation.serving else None
    return Planner(replace(situation.run, warm_start=start), champion)


class Staleness(StrictModel):
    """Why a champion is stale, or that it is not."""

    deployment: str
    version: str | None = Field(description="the champion; None where nothing serves")
    stale: bool
    action: Action
    reasons: tuple[str, ...]
    details: tuple[PartChange, ...]

    def lines(self, *, each: int = 3) -> Iterator[str]:
        """A few lines for people; at most `each` of what changed in a part."""
        name = f"{self.deployment} version {self.version}" if self.version else self.deployment
        if self.version is None:
            yield f"{name}: nothing serves yet"
        elif not self.stale:
            yield f"{name} is in step with its verifier and runtime"
        else:
            yield f"{name} is stale:"
        yield from (f"  {reason}" for reason in self.reasons if self.version is not None)
        for change in self.details:
            shown, left = change.lines[:each], len(change.lines) - each
            yield f"    {change.part}: {'; '.join(shown)}{f' … {left} more' if left > 0 else ''}"


def explain(recipe: Recipe) -> Staleness:
    """Say whether the recipe's champion is stale, and why."""
    situation = Situation.of(recipe)
    return staleness(recipe.deployment, situation.serving, situation.decision, situation.details)
