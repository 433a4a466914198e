"""The report of a candidate, put together from what the run left in the store, and shown where people look."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from prefect.artifacts import create_markdown_artifact
from prefect.context import FlowRunContext

from speculators_core.config import Recipe
from speculators_core.evaluation.candidate import (
    CandidateReport,
    Curve,
    PartLine,
    StageCost,
    arms_of,
    to_markdown,
)
from speculators_core.evaluation.page import to_html
from speculators_core.evaluation.records import Measurement
from speculators_core.evaluation.report import EvaluationReport
from speculators_core.lifecycle.changes import Proven
from speculators_core.lifecycle.gate import GateDecision
from speculators_core.lifecycle.plan import MADE_OF, MadeOf
from speculators_core.run import Run
from speculators_core.store.manifest import Manifest
from speculators_core.training.callbacks.metrics_log import read_metrics
from speculators_core.types import ArtifactRef
from speculators_core.verifier.difference import difference
from speculators_core.verifier.fingerprint import PARTS, recall
from tasks.adapters.redaction import redact, scrub
from tasks.observe import parent_run, tracking

log = logging.getLogger(__name__)

_DATA_FACTS = ("conversations", "rows", "tokens", "supervised_tokens", "splits", "domains", "dropped", "truncated")


def build_report(
    run: Run,
    registered: tuple[str, str],
    draft: ArtifactRef,
    dataset: ArtifactRef,
    decision: GateDecision,
    measured: tuple[EvaluationReport, EvaluationReport | None, Measurement | None],
    incumbent: tuple[str, Mapping[str, str]] | None,
) -> CandidateReport:
    """Everything about a candidate in one document.

    Args:
        registered: model and version.
        measured: the candidate, the incumbent, and n-gram look-up, as far as they were measured.
        incumbent: version and tags of what serves.
    """
    candidate, against, ngram = measured
    model, version = registered
    lineage = dict(trace(run, draft))
    speeds = candidate.alternating or (() if candidate.speed is None else (candidate.speed,))
    proven = None if incumbent is None else Proven.of_tags(*incumbent)
    recipe = run.recipe
    return CandidateReport(
        model=model,
        version=version,
        recipe=recipe.name,
        algorithm=str(recipe.algorithm["kind"]),
        verifier=recipe.verifier.publish_as or run.verifier.name,
        vllm=run.runtime.vllm,
        outcome=decision.outcome,
        reasons=decision.reasons,
        reported=decision.reported,
        prompts=candidate.acceptance.prompts,
        k=candidate.acceptance.k,
        measured=candidate.measured_in_words,
        arms=arms_of(
            candidate,
            against,
            ngram,
            labels=(f"version {version}", "incumbent" if incumbent is None else f"version {incumbent[0]} (serves)"),
        ),
        speeds=tuple(sorted(speeds, key=lambda speed: speed.concurrency)),
        parts=tuple(part_lines(run, proven)),
        data_card=data_card(run, dataset),
        curves=curves(run, lineage.get("training")),
        stages=tuple(costs(run, {**lineage, "dataset": dataset})),
        command=f"draftsmith retrain {recipe.name}.yaml\n\n# {recipe.name}.yaml, resolved\n{resolved(recipe)}",
        facts=(
            ("recipe", recipe.digest()),
            ("draft", draft.digest),
            ("dataset", dataset.digest),
            ("prompts", candidate.identity.prompts),
            ("verifier", run.fingerprint.digest),
            ("runtime", run.runtime.key),
        ),
    )


def publish_report(run: Run, report: CandidateReport) -> str:
    """Keep the page and its Markdown with the recipe's run in MLflow, and show the Markdown in Prefect's pages.

    Returns where the page lies: an address of MLflow's.
    """
    parent = parent_run(run.recipe.digest(), run.recipe.name)
    markdown = redact(to_markdown(report))
    with tempfile.TemporaryDirectory(prefix="draftsmith-report-") as folder:
        name = f"{report.model}-v{report.version}"
        (Path(folder) / f"{name}.html").write_text(redact(to_html(report)), encoding="utf-8")
        (Path(folder) / f"{name}.md").write_text(markdown, encoding="utf-8")
        tracking().handle(parent).files(Path(folder), "reports")
    if FlowRunContext.get() is not None:
        create_markdown_artifact(markdown, key=f"report-{report.model}", description=f"version {report.version}")
    where = f"runs:/{parent}/reports/{name}.html"
    log.info("report=%s", where)
    return where


def resolved(recipe: Recipe) -> str:
    """The whole recipe as YAML, defaults and overrides included, without what secrets somebody wrote into it."""
    shown = scrub(recipe.model_dump(mode="json"), allow_text=True)
    text: str = yaml.safe_dump(shown, sort_keys=False, allow_unicode=True)
    return text


def trace(run: Run, ref: ArtifactRef) -> Iterator[tuple[str, ArtifactRef]]:
    """Kind → artifact of everything in the store that this one was made of, itself first."""
    known = {one.digest: one for one in run.store.artifacts()}
    open_ends = [ref]
    while open_ends:
        one = open_ends.pop()
        yield one.kind, one
        made_of = run.store.manifest(one).meta.get(MADE_OF)
        inputs = () if made_of is None else MadeOf.model_validate(made_of).inputs.values()
        open_ends += [known[digest] for digest in inputs if digest in known]


def part_lines(run: Run, proven: Proven | None) -> Iterator[PartLine]:
    """What the draft is tied to, against what the incumbent was proven on."""
    before = None if proven is None or proven.fingerprint is None else recall(proven.fingerprint, run.home)
    details = {} if before is None else {change.part: change.lines for change in difference(before, run.description)}
    for part in PARTS:
        yield PartLine(
            name=part,
            here=run.fingerprint.parts[part],
            incumbent=None if proven is None else proven.parts.get(part),
            details=tuple(details.get(part, ())),
        )
    info = run.runtime
    yield PartLine(
        name="runtime",
        here=info.key,
        incumbent=None if proven is None else proven.runtime_key,
        details=(f"vLLM {info.vllm} ({info.build}) on {info.device}, model runner {info.model_runner}",),
    )


def data_card(run: Run, dataset: ArtifactRef) -> tuple[tuple[str, str], ...]:
    """What the draft was trained and measured on, in counts."""
    meta = run.store.manifest(dataset).meta
    told = [(name.replace("_", " "), _words(meta[name])) for name in _DATA_FACTS if name in meta]
    return (*told, ("sources", f"{len(run.recipe.data.sources)} named in the recipe"))


def curves(run: Run, training: ArtifactRef | None) -> tuple[Curve, ...]:
    """Loss and walked acceptance length by step; none for a draft that was not trained here."""
    if training is None:
        return ()
    lines = read_metrics(run.store.path(training) / "metrics.jsonl")
    found = {
        "training loss": [(line["step"], line["loss"]) for line in lines if line["kind"] == "train"],
        "walked acceptance length": [(line["step"], line["eal"]) for line in lines if line.get("eal") is not None],
    }
    return tuple(Curve(name=name, points=tuple(points)) for name, points in found.items() if points)


def costs(run: Run, artifacts: Mapping[str, ArtifactRef]) -> Iterator[StageCost]:
    """Time, bytes, tokens and price of each stage behind the draft, in the order of the loop."""
    order = ("dataset", "states", "training", "draft")
    for kind in sorted(artifacts, key=lambda kind: order.index(kind) if kind in order else len(order)):
        manifest = run.store.manifest(artifacts[kind])
        made_of = manifest.meta.get(MADE_OF)
        stage = MadeOf.model_validate(made_of) if made_of is not None else None
        yield StageCost(
            name=kind if stage is None else stage.stage,
            seconds=None if stage is None else stage.seconds,
            num_bytes=manifest.num_bytes,
            tokens=_tokens(manifest),
            price=None if stage is None else run.recipe.lifecycle.price(stage.stage, stage.seconds),
        )


def _tokens(manifest: Manifest) -> int | None:
    found = manifest.meta.get("tokens")
    return found if isinstance(found, int) else None


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_words(item)}" for key, item in value.items()) or "none"
    return f"{value:,}" if isinstance(value, int) else str(value)
