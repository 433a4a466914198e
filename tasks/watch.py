"""Looking at what is declared, and reacting to what changed: the two halves of the flow `watch`."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import Field

from speculators_core.config import load_recipe
from speculators_core.errors import DraftsmithError, EngineError, VerifierError
from speculators_core.lifecycle.changes import Action, Change
from speculators_core.lifecycle.drift import DriftVerdict, Incident
from speculators_core.types import StrictModel
from tasks.events import EngineChanged, VerifierChanged
from tasks.notices import deliver
from tasks.planning import Situation
from tasks.policies import stage_task
from tasks.requests import UpkeepRequest
from tasks.runs import UPKEEP_DEPLOYMENT, Outcome, ensure_run, supersede
from tasks.traffic import watch_traffic

log = logging.getLogger(__name__)


class Finding(StrictModel):
    """One recipe against what serves."""

    recipe: str
    deployment: str | None = None
    version: str | None = Field(None, description="champion")
    action: Action = "nothing"
    changes: tuple[Change, ...] = ()
    reasons: tuple[str, ...] = ()
    fingerprint: str | None = None
    runtime_key: str | None = None
    vllm: str | None = None
    traffic: DriftVerdict | None = Field(None, description="served acceptance; None where nothing serves")
    incident: Incident | None = Field(None, description="a fall of it that is not over")
    blind: str | None = Field(None, description="why its traffic could not be looked at; all else is done")
    error: str | None = Field(None, description="why it could not be looked at; nothing is done then")

    @property
    def cause(self) -> str:
        """Names what a run is for: deployment, verifier, runtime, incident and action; the idempotency key of it."""
        since = "" if self.incident is None else f" {self.incident.since}"
        world = hashlib.sha256(f"{self.fingerprint} {self.runtime_key}{since}".encode()).hexdigest()[:24]
        return f"{self.deployment}:{self.action}:{world}"

    def request(self) -> UpkeepRequest:
        """What it asks for, in the world that it was found in."""
        return UpkeepRequest(
            recipe=self.recipe, action=self.action, expected=self.fingerprint, expected_runtime=self.runtime_key
        )


class Reaction(StrictModel):
    """What was done about a finding."""

    finding: Finding
    run: str | None = Field(None, description="flow run that sees to it")
    outcome: Outcome | None = None
    superseded: tuple[str, ...] = Field((), description="runs for older changes that were cancelled")


@stage_task("look", retries=0)
def look_at(recipes: Sequence[str], metrics: Mapping[str, str]) -> list[Finding]:
    """Hold what each recipe declares, and its traffic, against its champion; what cannot be read is said.

    Args:
        metrics: deployment → address of its engine's counters, or the variable that holds it, where no supervisor of
            ours notes them.
    """
    return [find(recipe, metrics) for recipe in recipes]


@stage_task("react", retries=2)
def react(findings: Sequence[Finding]) -> list[Reaction]:
    """For each change: an event and one run, and an end to runs for older changes of the same deployment."""
    done = [reaction_to(finding) for finding in findings if finding.error is None]
    deliver()  # what no channel has taken yet
    return done


def require_all_seen(findings: Sequence[Finding]) -> None:
    """Fail, after all else was done, where something could not be looked at: a silent watch is none.

    Raises:
        VerifierError: names each recipe and why.
    """
    errors = [(finding.recipe, finding.error or finding.blind) for finding in findings]
    if blind := [f"{recipe}: {error}" for recipe, error in errors if error is not None]:
        raise VerifierError(f"{len(blind)} of {len(findings)} recipes could not be looked at: {'; '.join(blind)}")


def find(recipe: str, metrics: Mapping[str, str]) -> Finding:
    """One recipe's finding."""
    traffic, blind = None, None
    try:
        loaded = load_recipe(Path(recipe))
        situation = Situation.of(loaded)
        try:
            traffic = watch_traffic(situation, recipe, metrics.get(loaded.deployment))
        except EngineError as error:
            log.warning("%s", error)
            blind = error.what
        decision, world = situation.decision, situation.world
    except DraftsmithError as error:
        log.warning("%s cannot be looked at: %s", recipe, error)
        return Finding(recipe=recipe, error=str(error.what))
    return Finding(
        recipe=recipe,
        deployment=loaded.deployment,
        version=None if situation.proven is None else situation.proven.version,
        action=decision.action,
        changes=decision.changes,
        reasons=decision.reasons,
        fingerprint=world.verifier.digest,
        runtime_key=world.runtime_key,
        vllm=world.runtime.vllm,
        traffic=traffic,
        incident=situation.incident,
        blind=blind,
    )


def reaction_to(finding: Finding) -> Reaction:
    """Start what the finding asks for, once; cancel what it made void."""
    mark = f"upkeep:{finding.deployment}"
    if finding.action == "nothing":
        return Reaction(finding=finding, superseded=supersede(mark, None))
    request = finding.request()
    superseded = supersede(mark, finding.cause)
    run = ensure_run(
        UPKEEP_DEPLOYMENT, finding.cause, {"request": request.model_dump(mode="json")}, [mark, str(finding.action)]
    )
    if run.outcome == "started":
        announce(finding)
    return Reaction(finding=finding, run=run.run_id, outcome=run.outcome, superseded=superseded)


def announce(finding: Finding) -> None:
    """One event for a changed verifier, one for a changed runtime; that traffic drifted was told when it was seen."""
    assert finding.deployment and finding.fingerprint and finding.runtime_key and finding.vllm
    about = {
        "deployment": finding.deployment,
        "recipe": finding.recipe,
        "version": finding.version,
        "reasons": finding.reasons,
    }
    of_verifier = tuple(change for change in finding.changes if change not in ("runtime", "traffic"))
    if of_verifier:
        changed = VerifierChanged.model_validate({**about, "fingerprint": finding.fingerprint, "changes": of_verifier})
        changed.emit(finding.fingerprint)
    if "runtime" in finding.changes:
        engine = EngineChanged.model_validate({**about, "runtime_key": finding.runtime_key, "vllm": finding.vllm})
        engine.emit(finding.runtime_key)
