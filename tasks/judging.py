"""What the gate says of a registered version, measured here and now, and what of it stays with the version."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from speculators_core import stages
from speculators_core.data.rows import RowSet
from speculators_core.evaluation.records import Measurement, read_measurement
from speculators_core.evaluation.report import EvaluationReport
from speculators_core.lifecycle.gate import GateDecision, decide
from speculators_core.lifecycle.matrix import FINGERPRINT_TAG, GATE_TAG, RUNTIME_TAG, Cell, Pair, cell_of
from speculators_core.run import Run
from speculators_core.stages import read_evaluation
from speculators_core.store.manifest import sha256_json
from speculators_core.types import ArtifactRef
from tasks.adapters.aliases import MlflowAliases
from tasks.adapters.settings import settings
from tasks.observe import note_total_cost
from tasks.reporting import build_report, publish_report
from tasks.versions import INCUMBENT_TAG, NO_INCUMBENT, REPORT_TAG, fetch_draft, open_aliases, require_version

log = logging.getLogger(__name__)

DECISION_TAG, RULES_TAG = "gate.decision", "gate.rules"

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
    registered: tuple[str, str],
    draft: ArtifactRef,
    dataset: ArtifactRef,
    incumbent: str | None,
) -> Verdict:
    """The gate's verdict on a registered version, left on it as tags, as a cell of the matrix, and as a report.

    Args:
        registered: model and version · incumbent: the version that serves, if another does.
    """
    model, version = registered
    displaced = None if incumbent is None else fetch_draft(settings(), aliases.tags(model, incumbent), model, incumbent)
    verdict = judge(run, (run.store.path(draft), draft.digest), displaced, dataset)
    note_total_cost(run)
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
        if cell_of(tags := aliases.tags(model, incumbent), **pair).outcome is None:  # never measured on this pair
            alone = decide(verdict.incumbent, None, run.recipe.gate)
            cell = cell_here(run, verdict.incumbent, alone, verdict.evaluations[1])
            note_cell(aliases, model, incumbent, as_compared(cell, tags))
    return verdict


def measure_version(run: Run, model: str, version: str, dataset: ArtifactRef) -> Cell:
    """Measure a registered version alone on the recipe's verifier and runtime, and fill that cell of the matrix.

    Raises:
        ConfigError: no such model or version. RegistryError: its files were changed, or MLflow is away.
    """
    aliases = open_aliases()
    tags = require_version(aliases, model, version)
    draft = fetch_draft(settings(), tags, model, version)
    verdict = judge(run, draft, None, dataset)
    note_total_cost(run)
    cell = as_compared(cell_here(run, verdict.candidate, verdict.decision, verdict.evaluations[0]), tags)
    if cell.outcome != verdict.decision.outcome:
        log.warning(
            "alone, version %s of %s would %s here; against version %s the gate said %s, so its cell is %s",
            *(version, model, verdict.decision.outcome, tags[INCUMBENT_TAG], tags[GATE_TAG], cell.outcome),
        )
    note_cell(aliases, model, version, cell)
    return cell


def compared_with(aliases: MlflowAliases, model: str, version: str) -> str | None:
    """The version that the gate held this one against; None where it held it against none, or that is gone."""
    seen = aliases.tags(model, version).get(INCUMBENT_TAG)
    return seen if seen in aliases.versions(model) else None


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


def as_compared(cell: Cell, tags: Mapping[str, str]) -> Cell:
    """The cell of a version that was judged alone, no better than what the gate said of it against an incumbent.

    There is one rule for what replaces what serves. A version that was once held against another and did not pass
    keeps that outcome on its own pair, and is at most inconclusive on others, where nobody has compared the two.
    """
    said = tags.get(GATE_TAG)
    if tags.get(INCUMBENT_TAG, NO_INCUMBENT) == NO_INCUMBENT or said == "pass" or cell.outcome == "fail":
        return cell
    own = cell.pair.key == (tags.get(FINGERPRINT_TAG), tags.get(RUNTIME_TAG))
    return cell.model_copy(update={"outcome": said if own else "inconclusive"})


def note_cell(aliases: MlflowAliases, model: str, version: str, cell: Cell) -> None:
    """Fill a version's cell of the matrix."""
    aliases.set_tags(model, version, {cell.tag: cell.model_dump_json()})


def verifier_name(run: Run) -> str:
    """Hub id where the recipe names one, else the directory's name."""
    return run.published_name if not Path(run.published_name).is_absolute() else Path(run.published_name).name
