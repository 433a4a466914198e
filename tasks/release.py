"""The last part of the loop: a draft into the registry, past the gate, and under the alias that serving follows."""

from __future__ import annotations

import getpass
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from speculators_core import stages
from speculators_core.config import Recipe
from speculators_core.data.rows import RowSet
from speculators_core.lifecycle.gate import GateDecision, decide
from speculators_core.lifecycle.promotion import CHALLENGER, CHAMPION, GATE_TAG
from speculators_core.lifecycle.promotion import promote as move_champion
from speculators_core.run import NotProduced, Run, StageResult
from speculators_core.stages import read_evaluation
from speculators_core.store.manifest import MANIFEST_NAME
from speculators_core.summary import (
    AcceptanceSummary,
    DraftSummary,
    GateSummary,
    LoopSummary,
    LosslessSummary,
    RegistrySummary,
    RuntimeSummary,
    SpeedSummary,
    StageTime,
    TrainingSummary,
    VerifierSummary,
)
from speculators_core.types import ArtifactRef, StrictModel
from tasks.adapters.aliases import MlflowAliases
from tasks.adapters.registry import DRAFT_TAG, DraftRegistry, VersionFacts, draft_is_kept
from tasks.adapters.settings import settings
from tasks.observe import flow_run_id, parent_run, tracking
from tasks.policies import stage_task

log = logging.getLogger(__name__)


class Registration(StrictModel):
    """A draft's version in the registry."""

    name: str = "register"
    model: str
    version: str
    seconds: float
    cached: bool


class PromotionResult(StrictModel):
    """What the gate said, and what it moved."""

    name: str = "promote"
    model: str
    version: str
    outcome: str
    reasons: tuple[str, ...]
    aliases: tuple[str, ...]
    seconds: float
    cached: bool


@stage_task("register")
def register(recipe: Recipe, draft: ArtifactRef, evaluation: ArtifactRef) -> Registration:
    """Make the draft a version of the deployment's registered model."""
    return register_draft(Run(recipe, settings().home), draft, evaluation)


@stage_task("promote")
def promote(recipe: Recipe, registration: Registration, draft: ArtifactRef, dataset: ArtifactRef) -> PromotionResult:
    """Ask the gate, and move `champion` when it passes."""
    return promote_version(Run(recipe, settings().home), registration, draft, dataset)


def register_draft(run: Run, draft: ArtifactRef, evaluation: ArtifactRef) -> Registration:
    """Register by the draft's digest: the same draft for the same verifier and runtime is the same version.

    Raises:
        RegistryError: MLflow is away or refuses; the draft is kept, and `draftsmith register` tries again.
    """
    started = time.monotonic()
    recipe, path = run.recipe, run.store.path(draft)
    retry = f"draftsmith register <the recipe {recipe.name}>"
    with draft_is_kept(path, retry):
        parent = parent_run(recipe.digest(), recipe.name)
        done = DraftRegistry(tracking()).register(
            recipe.deployment,
            path,
            path.parent / MANIFEST_NAME,
            version_facts(run, draft, evaluation, parent),
            run_id=parent,
            retry_hint=retry,
        )
    seconds = time.monotonic() - started
    return Registration(model=done.model, version=done.version, seconds=seconds, cached=not done.created)


def version_facts(run: Run, draft: ArtifactRef, evaluation: ArtifactRef, parent: str) -> VersionFacts:
    """What the version's tags will say."""
    recipe, acceptance = run.recipe, read_evaluation(run, evaluation).acceptance
    return VersionFacts(
        draft_digest=draft.digest,
        verifier_name=verifier_name(run),
        verifier_revision=recipe.verifier.revision,
        verifier_uri=str(run.verifier),
        verifier_fingerprint=run.fingerprint.digest,
        tokenizer_sha256=run.fingerprint.parts["tokenizer"],
        chat_template_sha256=run.fingerprint.parts["chat_template"],
        vllm_version=run.runtime.vllm,
        runtime_key=run.runtime.key,
        algorithm=str(recipe.algorithm["kind"]),
        k=acceptance.k,
        al=acceptance.al,
        al_low=acceptance.interval.low if acceptance.interval else None,
        prefect_flow_run_id=flow_run_id(),
        mlflow_run_id=parent,
        extra={"recipe.digest": recipe.digest(), "evaluation.digest": evaluation.digest},
    )


def promote_version(run: Run, registration: Registration, draft: ArtifactRef, dataset: ArtifactRef) -> PromotionResult:
    """Judge a registered version against the floor and the incumbent, note the verdict, and move the aliases.

    Raises:
        RegistryError: MLflow is away, or somebody promoted another version meanwhile.
    """
    started = time.monotonic()
    model, version = registration.model, registration.version
    who = f"prefect:{flow_run_id()}" if flow_run_id() else getpass.getuser()
    aliases = MlflowAliases(tracking(), actor=who)
    champion = aliases.get_alias(model, CHAMPION)
    incumbent = None if champion in (None, version) else fetch_version(run, aliases, model, str(champion))
    decision = judge(run, (run.store.path(draft), draft.digest), incumbent, dataset)
    note_decision(aliases, model, version, decision)
    changed = False
    if decision.passed:
        moved = move_champion(
            aliases,
            model,
            version,
            expected=champion,
            verifier_fingerprint=run.fingerprint.digest,
            runtime_key=run.runtime.key,
            who=who,
            why="; ".join(decision.reasons),
            home=run.home,
        )
        changed = moved.changed
    elif champion != version:
        aliases.set_alias(model, CHALLENGER, version)
    held = tuple(sorted(name for name, number in aliases.aliases(model).items() if number == version))
    log.info("gate=%s model=%s version=%s aliases=%s", decision.outcome, model, version, ",".join(held))
    return PromotionResult(
        model=model,
        version=version,
        outcome=decision.outcome,
        reasons=decision.reasons,
        aliases=held,
        seconds=time.monotonic() - started,
        cached=not changed and champion == version,
    )


Draft = tuple[Path, str]
"""A draft's directory, and the digest that names its bytes."""


def judge(run: Run, candidate: Draft, incumbent: Draft | None, dataset: ArtifactRef) -> GateDecision:
    """The gate's verdict, both on the same prompts; more are drawn while it is inconclusive and they would help."""
    held_back = len(RowSet.open(run.store.path(dataset)).prompts())
    while True:
        reports = [
            None if draft is None else read_evaluation(run, stages.evaluate(run, *draft, dataset).ref)
            for draft in (candidate, incumbent)
        ]
        assert reports[0] is not None
        decision = decide(reports[0], reports[1], run.recipe.gate)
        used = reports[0].acceptance.prompts
        wanted = min(decision.next_prompts or 0, held_back)
        if decision.outcome != "inconclusive" or wanted <= used:
            return decision
        log.info("gate=inconclusive prompts=%d drawing up to %d", used, wanted)
        evaluation = run.recipe.evaluation.model_copy(update={"max_prompts": wanted})
        run = replace(run, recipe=run.recipe.model_copy(update={"evaluation": evaluation}))


def fetch_version(run: Run, aliases: MlflowAliases, model: str, version: str) -> Draft:
    """A registered version's draft, verified, by its immutable number."""
    digest = aliases.tags(model, version)[DRAFT_TAG]
    return DraftRegistry(tracking()).download(model, version, run.home / "drafts" / digest), digest


def note_decision(aliases: MlflowAliases, model: str, version: str, decision: GateDecision) -> None:
    """Leave the verdict on the version: outcome as tags, everything as JSON in one tag."""
    aliases.set_tags(
        model,
        version,
        {
            GATE_TAG: decision.outcome,
            "gate.reasons": "; ".join(decision.reasons),
            "gate.decision": decision.model_dump_json(),
        },
    )


def verifier_name(run: Run) -> str:
    """Hub id where the recipe names one, else the directory's name."""
    return run.recipe.verifier.publish_as or run.verifier.name


def summarise(
    recipe: Recipe,
    results: Sequence[StageResult],
    registration: Registration,
    promotion: PromotionResult,
    seconds: float,
) -> LoopSummary:
    """Everything that the loop found, as one document."""
    run = Run(recipe, settings().home)
    by_name = {result.name: result for result in results}
    report = read_evaluation(run, by_name["evaluate"].ref)
    a, speed, lossless = report.acceptance, report.speed, report.lossless
    assert speed is not None and lossless is not None and a.interval is not None
    trained = by_name["train"].summary
    times = [StageTime(name=r.name, seconds=round(r.seconds, 2), cached=r.cached) for r in results]
    times += [StageTime(name=r.name, seconds=round(r.seconds, 2), cached=r.cached) for r in (registration, promotion)]
    return LoopSummary(
        recipe=recipe.name,
        verifier=VerifierSummary(name=verifier_name(run), path=str(run.verifier), fingerprint=run.fingerprint.digest),
        runtime=RuntimeSummary(vllm=run.runtime.vllm),
        draft=DraftSummary(
            algorithm=str(recipe.algorithm["kind"]),
            path=str(run.store.path(by_name["export"].ref)),
            digest=by_name["export"].ref.digest,
        ),
        acceptance=AcceptanceSummary(
            k=a.k,
            al=a.al,
            interval=(a.interval.low, a.interval.high),
            per_position=a.per_position,
            drafts=a.drafts,
            accepted=a.accepted,
            prompts=a.prompts,
            tokens=a.tokens,
        ),
        lossless=LosslessSummary(prompts=lossless.prompts, identical=lossless.identical),
        speed=SpeedSummary(with_draft=speed.with_, without=speed.without, concurrency=speed.concurrency),
        training=TrainingSummary(
            tokens=trained["tokens"], seconds=trained["seconds"], eal=trained["validation"].get("eal")
        ),
        registry=RegistrySummary(model=promotion.model, version=promotion.version, aliases=promotion.aliases),
        gate=GateSummary(passed=promotion.outcome == "pass", outcome=promotion.outcome, reasons=promotion.reasons),
        stages=tuple(times),
        seconds=round(seconds, 1),
    )


class StatusLine(StrictModel):
    """One line of a recipe's status."""

    name: str
    state: str
    text: str


class Status(StrictModel):
    """Where a recipe stands: its stages, then what is registered."""

    recipe: str
    lines: tuple[StatusLine, ...]


def describe_status(recipe: Recipe) -> Status:
    """Look, without making anything, at each stage in order and at the registry."""
    run = Run(recipe, settings().home, only_look=True)
    lines: list[StatusLine] = []
    try:
        for result in stages.run_until(run, "evaluate"):
            lines.append(StatusLine(name=result.name, state="done", text=f"done     {result.ref.uri}"))
    except NotProduced as missing:
        todo = stages.ORDER[len(lines) :]
        lines += [StatusLine(name=name, state="to do", text="to do") for name in todo]
        log.debug("%s", missing)
    for version, tags in registered_versions(recipe):
        text = "  ".join(f"{key}={value}" for key, value in tags.items())
        lines.append(StatusLine(name=f"version {version}", state="registered", text=text))
    return Status(recipe=recipe.name, lines=tuple(lines))


def registered_versions(recipe: Recipe) -> list[tuple[str, dict[str, Any]]]:
    """Versions of the deployment's model with the tags one looks for; empty where MLflow has no store yet."""
    database = settings().sqlite_file
    if database is not None and not Path(database).exists():
        return []
    aliases = MlflowAliases(tracking(), actor="status")
    names = aliases.aliases(recipe.deployment)
    found = []
    for version in aliases.versions(recipe.deployment):
        tags = aliases.tags(recipe.deployment, version)
        held = [name for name, number in names.items() if number == version]
        found.append(
            (
                version,
                {"al": tags.get("al", "-"), "gate": tags.get(GATE_TAG, "-"), "aliases": ",".join(sorted(held)) or "-"},
            )
        )
    return found
