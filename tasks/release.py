"""The last part of the loop: a draft into the registry, past the gate, and under the alias that serving follows."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from speculators_core import stages
from speculators_core.config import Recipe
from speculators_core.lifecycle.changes import tags_of
from speculators_core.lifecycle.matrix import FINGERPRINT_TAG, GATE_TAG, RUNTIME_TAG
from speculators_core.lifecycle.promotion import CHALLENGER, CHAMPION, settle
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
from tasks.adapters.registry import DRAFT_TAG, DraftRegistry, VersionFacts, draft_is_kept
from tasks.adapters.registry_view import ModelView, look
from tasks.adapters.settings import settings
from tasks.events import GateRefused
from tasks.judging import compared_with, judge_version, noted_decision, verifier_name
from tasks.observe import flow_run_id, parent_run, tracking
from tasks.planning import world_of
from tasks.policies import stage_task
from tasks.verifier_tags import TEMPLATE_TAG
from tasks.versions import (
    APPROVAL_TAG,
    EVALUATION_TAG,
    actor,
    announce_move,
    fetch_draft,
    open_aliases,
)
from tasks.warm_start import BEGAN_TAG, recipe_start

log = logging.getLogger(__name__)

APPROVED = "approved"


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
    awaits_approval: bool = Field(False, description="the gate passed it; a person has to approve")


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
    recipe, report = run.recipe, read_evaluation(run, evaluation)
    acceptance, made = report.acceptance, run.store.manifest(draft).meta
    return VersionFacts(
        draft_digest=draft.digest,
        verifier_name=verifier_name(run),
        verifier_revision=recipe.verifier.revision,
        verifier_uri=verifier_uri(run),
        verifier_fingerprint=run.fingerprint.digest,
        tokenizer_sha256=run.fingerprint.parts["tokenizer"],
        chat_template_sha256=run.fingerprint.parts["chat_template"],
        vllm_version=run.runtime.vllm,
        runtime_key=run.runtime.key,
        algorithm=str(recipe.algorithm["kind"]),
        k=acceptance.k,
        measured_by=report.measured_by,
        al=acceptance.al,
        al_low=acceptance.interval.low if acceptance.interval else None,
        prefect_flow_run_id=flow_run_id(),
        mlflow_run_id=parent,
        extra={
            "recipe.digest": recipe.digest(),
            EVALUATION_TAG: evaluation.digest,
            **tags_of(world_of(run)),
            TEMPLATE_TAG: json.dumps(recipe.data.template_kwargs),
            **({BEGAN_TAG: json.dumps(made["began_from"])} if "began_from" in made else {}),  # not of an adopted one
        },
    )


def promote_version(run: Run, registration: Registration, draft: ArtifactRef, dataset: ArtifactRef) -> PromotionResult:
    """Judge a registered version against the floor and what serves, note the verdict, and move the aliases.

    Raises:
        RegistryError: MLflow is away, or somebody promoted another version meanwhile.
    """
    started = time.monotonic()
    model, version = registration.model, registration.version
    aliases = open_aliases()
    serving = settle(aliases, model, runtime_key=run.runtime.key, home=run.home).version
    # what serves was compared with what served before it: judged again alone, that would be forgotten
    incumbent = compared_with(aliases, model, version) if serving == version else serving
    decision = noted_decision(run, aliases.tags(model, version)) if serving == version else None
    if decision is None:
        decision = judge_version(run, aliases, (model, version), draft, dataset, incumbent).decision
    approval = aliases.tags(model, version).get(APPROVAL_TAG)
    waits = decision.passed and run.recipe.gate.approval == "required" and approval != APPROVED and serving != version
    changed = False
    if decision.passed and not waits:
        if serving != version:  # what serving will fetch is whole
            fetch_draft(settings(), aliases.tags(model, version), model, version)
        moved = move_champion(
            aliases,
            model,
            version,
            expected=serving,
            verifier_fingerprint=run.fingerprint.digest,
            runtime_key=run.runtime.key,
            who=actor(),
            why="; ".join(decision.reasons),
            home=run.home,
        )
        changed = moved.changed
        announce_move(moved, "; ".join(decision.reasons))
    elif serving != version:
        aliases.set_alias(model, CHALLENGER, version)
    if not decision.passed:
        refused = GateRefused(deployment=model, version=version, outcome=decision.outcome, reasons=decision.reasons)
        refused.emit(f"version {version} on {run.fingerprint.digest} {run.runtime.key}")
    held = tuple(sorted(name for name, number in aliases.aliases(model).items() if number == version))
    log.info("gate=%s model=%s version=%s aliases=%s", decision.outcome, model, version, ",".join(held))
    return PromotionResult(
        model=model,
        version=version,
        outcome=decision.outcome,
        reasons=decision.reasons,
        aliases=held,
        seconds=time.monotonic() - started,
        cached=not changed and serving == version,
        awaits_approval=waits,
    )


def verifier_uri(run: Run) -> str:
    """Where the verifier lies: a directory, made absolute, or what the recipe says of a hub or a URL."""
    path = run.recipe.verifier.path
    return str(Path(path).expanduser().absolute()) if Path(path).expanduser().exists() else path


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
    a, speed, lossless = report.acceptance, report.told_speed, report.lossless
    assert a.interval is not None
    draft = by_name["export" if "export" in by_name else "convert"].ref
    trained = by_name["train"].summary if "train" in by_name else None
    times = [StageTime(name=r.name, seconds=round(r.seconds, 2), cached=r.cached) for r in by_name.values()]
    times += [StageTime(name=r.name, seconds=round(r.seconds, 2), cached=r.cached) for r in (registration, promotion)]
    return LoopSummary(
        recipe=recipe.name,
        verifier=VerifierSummary(name=verifier_name(run), path=str(run.verifier), fingerprint=run.fingerprint.digest),
        runtime=RuntimeSummary(vllm=run.runtime.vllm),
        draft=DraftSummary(
            algorithm=str(recipe.algorithm["kind"]),
            path=str(run.store.path(draft)),
            digest=draft.digest,
        ),
        acceptance=AcceptanceSummary(
            measured_by=report.measured_by,
            k=a.k,
            al=a.al,
            interval=(a.interval.low, a.interval.high),
            per_position=a.per_position,
            drafts=a.drafts,
            accepted=a.accepted,
            prompts=a.prompts,
            tokens=a.tokens,
        ),
        lossless=None if lossless is None else LosslessSummary(prompts=lossless.prompts, identical=lossless.identical),
        speed=None
        if speed is None
        else SpeedSummary(
            with_draft=speed.with_, without=speed.without, concurrency=speed.concurrency, arms=speed.arms
        ),
        training=None
        if trained is None
        else TrainingSummary(
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

    @property
    def done(self) -> bool:
        """Whether nothing is left to do."""
        return all(line.state != "to do" for line in self.lines)


def describe_status(recipe: Recipe) -> Status:
    """Look, without making anything, at each stage in order and at the registry."""
    run = Run(recipe, settings().home, only_look=True, warm_start=recipe_start(recipe))
    registry = look(settings(), recipe.deployment)
    lines: list[StatusLine] = []
    found: dict[str, StageResult] = {}
    release: tuple[StatusLine, ...] = TO_RELEASE
    try:
        for result in stages.run_until(run, "evaluate"):
            lines.append(StatusLine(name=result.name, state="done", text=f"done     {result.ref.uri}"))
            found[result.name] = result
        release = release_lines(run, registry, found["export"].ref)
    except NotProduced as missing:
        todo = stages.order_of(recipe)[len(lines) :]
        lines += [StatusLine(name=name, state="to do", text="to do") for name in todo]
        log.debug("%s", missing)
    if "capture" not in stages.order_of(recipe):
        why = f"skipped  hidden_states.mode is {recipe.hidden_states.mode}: streamed into training"
        lines.insert(stages.ORDER.index("capture"), StatusLine(name="capture", state="skipped", text=why))
    lines += release
    for version in sorted(registry.tags, key=int):
        tags = registry.tags[version]
        held = ",".join(sorted(name for name, number in registry.aliases.items() if number == version))
        text = f"al={tags.get('al', '-')}  gate={tags.get(GATE_TAG, '-')}  aliases={held or '-'}"
        lines.append(StatusLine(name=f"version {version}", state="registered", text=text))
    if not registry.tags:
        text = f"nothing is registered as {recipe.deployment} yet"
        lines.append(StatusLine(name="registered", state="none", text=text))
    return Status(recipe=recipe.name, lines=tuple(lines))


TO_RELEASE = (
    StatusLine(name="register", state="to do", text="to do"),
    StatusLine(name="promote", state="to do", text="to do    the gate decides, every time"),
)


def release_lines(run: Run, registry: ModelView, draft: ArtifactRef) -> tuple[StatusLine, ...]:
    """Whether the evaluated draft is registered for its verifier and runtime, and whether it serves."""
    here = (draft.digest, run.fingerprint.digest, run.runtime.key)
    same = [
        version
        for version, tags in registry.tags.items()
        if (tags.get(DRAFT_TAG), tags.get(FINGERPRINT_TAG), tags.get(RUNTIME_TAG)) == here
    ]
    if not same:
        return TO_RELEASE
    version = min(same, key=int)
    registered = StatusLine(name="register", state="done", text=f"done     version {version}")
    if registry.version_of(CHAMPION) == version:
        return (registered, StatusLine(name="promote", state="done", text="done     it is the champion"))
    if (outcome := registry.tags[version].get(GATE_TAG, "pass")) != "pass":
        return (registered, StatusLine(name="promote", state="refused", text=f"refused  the gate said {outcome}"))
    return (registered, TO_RELEASE[1])
