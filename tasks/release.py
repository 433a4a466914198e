"""The last part of the loop: a draft into the registry, past the gate, and under the alias that serving follows."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from speculators_core import stages
from speculators_core.config import Recipe
from speculators_core.data.rows import RowSet
from speculators_core.evaluation.records import Measurement, read_measurement
from speculators_core.evaluation.report import EvaluationReport
from speculators_core.lifecycle.changes import tags_of
from speculators_core.lifecycle.gate import GateDecision, decide
from speculators_core.lifecycle.matrix import GATE_TAG, Cell, Pair, cell_of
from speculators_core.lifecycle.promotion import CHALLENGER, settle
from speculators_core.lifecycle.promotion import promote as move_champion
from speculators_core.run import NotProduced, Run, StageResult
from speculators_core.stages import read_evaluation
from speculators_core.store.manifest import MANIFEST_NAME, sha256_json
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
from tasks.adapters.registry import DraftRegistry, VersionFacts, draft_is_kept
from tasks.adapters.settings import settings
from tasks.observe import flow_run_id, parent_run, tracking
from tasks.planning import world_of
from tasks.policies import stage_task
from tasks.reporting import build_report, publish_report
from tasks.versions import (
    APPROVAL_TAG,
    EVALUATION_TAG,
    INCUMBENT_TAG,
    NO_INCUMBENT,
    REPORT_TAG,
    TEMPLATE_TAG,
    actor,
    fetch_draft,
    open_aliases,
    require_version,
)
from tasks.warm_start import BEGAN_TAG, recipe_start

log = logging.getLogger(__name__)

DECISION_TAG, RULES_TAG = "gate.decision", "gate.rules"
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
    recipe, acceptance = run.recipe, read_evaluation(run, evaluation).acceptance
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
        al=acceptance.al,
        al_low=acceptance.interval.low if acceptance.interval else None,
        prefect_flow_run_id=flow_run_id(),
        mlflow_run_id=parent,
        extra={
            "recipe.digest": recipe.digest(),
            EVALUATION_TAG: evaluation.digest,
            **tags_of(world_of(run)),
            TEMPLATE_TAG: json.dumps(recipe.data.template_kwargs),
            BEGAN_TAG: json.dumps(run.store.manifest(draft).meta.get("began_from")),
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
    serving = settle(aliases, model, pair=None, home=run.home).version
    incumbent = None if serving in (None, version) else serving
    # what serves was compared with what served before it: judged again alone, that would be forgotten
    decision = noted_decision(run, aliases.tags(model, version)) if serving == version else None
    if decision is None:
        decision = judge_version(run, aliases, registration, draft, dataset, incumbent).decision
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
    elif serving != version:
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
        cached=not changed and serving == version,
        awaits_approval=waits,
    )


Draft = tuple[Path, str]
"""A draft's directory, and the digest that names its bytes."""


@dataclass(frozen=True)
class Verdict:
    """The gate's decision with what it was made of."""

    decision: GateDecision
    candidate: EvaluationReport
    incumbent: EvaluationReport | None
    evaluations: tuple[str, ...]
    """Digests of the evaluations behind it, the candidate's first."""
    ngram: Measurement | None
    """The training-free baseline, where the recipe asks for it."""


def judge_version(
    run: Run,
    aliases: MlflowAliases,
    registration: Registration,
    draft: ArtifactRef,
    dataset: ArtifactRef,
    incumbent: str | None,
) -> Verdict:
    """The gate's verdict on a registered version, left on it as tags, as a cell of the matrix, and as a report."""
    model, version = registration.model, registration.version
    displaced = None if incumbent is None else fetch_draft(settings(), aliases.tags(model, incumbent), model, incumbent)
    verdict = judge(run, (run.store.path(draft), draft.digest), displaced, dataset)
    known = aliases.tags(model, version).get(DECISION_TAG)
    if known != verdict.decision.model_dump_json():  # the report of this very decision is not there yet
        serving = None if incumbent is None else (incumbent, aliases.tags(model, incumbent))
        measured = verdict.candidate, verdict.incumbent, verdict.ngram
        report = build_report(run, (model, version), draft, dataset, verdict.decision, measured, serving)
        aliases.set_tags(model, version, {REPORT_TAG: publish_report(run, report)})
    note_decision(run, aliases, model, version, verdict.decision, incumbent)
    note_cell(aliases, model, version, cell_here(run, verdict.candidate, verdict.decision, verdict.evaluations[0]))
    if incumbent is not None and verdict.incumbent is not None:
        pair = {"verifier_fingerprint": run.fingerprint.digest, "runtime_key": run.runtime.key}
        if cell_of(aliases.tags(model, incumbent), **pair).outcome is None:  # it was never measured on this pair
            alone = decide(verdict.incumbent, None, run.recipe.gate)
            note_cell(aliases, model, incumbent, cell_here(run, verdict.incumbent, alone, verdict.evaluations[1]))
    return verdict


def measure_version(run: Run, model: str, version: str, dataset: ArtifactRef) -> Cell:
    """Measure a registered version on the recipe's verifier and runtime, and fill that cell of the matrix.

    Raises:
        RegistryError: no such version, its files were changed, or MLflow is away.
    """
    aliases = open_aliases()
    draft = fetch_draft(settings(), require_version(aliases, model, version), model, version)
    verdict = judge(run, draft, None, dataset)
    cell = cell_here(run, verdict.candidate, verdict.decision, verdict.evaluations[0])
    note_cell(aliases, model, version, cell)
    return cell


def judge(run: Run, candidate: Draft, incumbent: Draft | None, dataset: ArtifactRef) -> Verdict:
    """The gate's verdict, both on the same prompts; more are drawn while it is inconclusive and they would help."""
    held_back = len(RowSet.open(run.store.path(dataset)).prompts())
    while True:
        refs = [stages.evaluate(run, *draft, dataset).ref for draft in (candidate, incumbent) if draft is not None]
        reports = [read_evaluation(run, ref) for ref in refs]
        against = reports[1] if incumbent is not None else None
        decision = decide(reports[0], against, run.recipe.gate)
        used = reports[0].acceptance.prompts
        wanted = min(decision.next_prompts or 0, held_back)
        if decision.outcome != "inconclusive" or wanted <= used:
            look_up = measure_baselines(run, dataset)
            return Verdict(decision, reports[0], against, tuple(ref.digest for ref in refs), look_up)
        log.info("gate=inconclusive prompts=%d drawing up to %d", used, wanted)
        evaluation = run.recipe.evaluation.model_copy(update={"max_prompts": wanted})
        run = replace(run, recipe=run.recipe.model_copy(update={"evaluation": evaluation}))


def measure_baselines(run: Run, dataset: ArtifactRef) -> Measurement | None:
    """N-gram look-up on the verdict's prompts, where the recipe asks for it and the engine is ours to start."""
    if not run.recipe.evaluation.baselines or not stages.has_baseline(run):
        return None
    return read_measurement(run.store.path(stages.measure_ngram(run, dataset).ref))


def noted_decision(run: Run, tags: Mapping[str, str]) -> GateDecision | None:
    """The decision that a version carries, if it was made on this verifier and runtime by these rules."""
    here = cell_of(tags, verifier_fingerprint=run.fingerprint.digest, runtime_key=run.runtime.key)
    if here.evaluation is None or tags.get(RULES_TAG) != rules(run):
        return None
    try:
        return GateDecision.model_validate_json(tags.get(DECISION_TAG, ""))
    except ValidationError:
        return None


def rules(run: Run) -> str:
    """Digest of the recipe's gate."""
    return sha256_json(run.recipe.gate.model_dump(mode="json"))


def note_decision(
    run: Run, aliases: MlflowAliases, model: str, version: str, decision: GateDecision, incumbent: str | None
) -> None:
    """Leave the verdict on the version: outcome as tags, everything as JSON in one tag."""
    aliases.set_tags(
        model,
        version,
        {
            GATE_TAG: decision.outcome,
            "gate.reasons": "; ".join(decision.reasons),
            DECISION_TAG: decision.model_dump_json(),
            RULES_TAG: rules(run),
            INCUMBENT_TAG: incumbent or NO_INCUMBENT,
        },
    )


def cell_here(run: Run, report: EvaluationReport, decision: GateDecision, evaluation: str) -> Cell:
    """What the gate says of a draft on the run's verifier and runtime."""
    pair = Pair(
        verifier_fingerprint=run.fingerprint.digest,
        runtime_key=run.runtime.key,
        verifier=verifier_name(run),
        vllm=run.runtime.vllm,
    )
    acceptance = report.acceptance
    return Cell(
        pair=pair, outcome=decision.outcome, al=acceptance.al, prompts=acceptance.prompts, evaluation=evaluation
    )


def note_cell(aliases: MlflowAliases, model: str, version: str, cell: Cell) -> None:
    """Fill a version's cell of the matrix."""
    aliases.set_tags(model, version, {cell.tag: cell.model_dump_json()})


def verifier_uri(run: Run) -> str:
    """Where the verifier lies: a directory, made absolute, or what the recipe says of a hub or a URL."""
    path = run.recipe.verifier.path
    return str(Path(path).expanduser().absolute()) if Path(path).expanduser().exists() else path


def verifier_name(run: Run) -> str:
    """Hub id where the recipe names one, else the directory's name."""
    return run.published_name if not Path(run.published_name).is_absolute() else Path(run.published_name).name


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
        speed=SpeedSummary(
            with_draft=speed.with_, without=speed.without, concurrency=speed.concurrency, arms=speed.arms
        ),
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
    run = Run(recipe, settings().home, only_look=True, warm_start=recipe_start(recipe))
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
