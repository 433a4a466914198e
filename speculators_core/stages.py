"""The loop's stages as plain functions: each finds its result in the store or makes it.

    preflight → prepare → capture → train → export → evaluate

A stage's cache key is a digest of its inputs, its configuration, its hand-bumped version and the versions of
vllm, torch and transformers where they matter; never a path, a run id or a commit (decision of the design).
Two processes that ask for the same key compute it once; a killed stage goes on from its workspace.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from speculators_core import registry
from speculators_core.config import Recipe
from speculators_core.data.rows import RowSet
from speculators_core.engine.runtime import RuntimeInfo, probe_runtime
from speculators_core.errors import DraftsmithError
from speculators_core.provenance import versions
from speculators_core.store import Store, input_digest
from speculators_core.types import ArtifactRef, ProgressCallback, StrictModel
from speculators_core.verifier.facts import VerifierFacts, read_facts
from speculators_core.verifier.fingerprint import Fingerprint, capture_key, fingerprint

if TYPE_CHECKING:
    from speculators_core.build import TrainRequest
    from speculators_core.engine.server import Engine
    from speculators_core.evaluation.report import EvaluationReport
    from speculators_core.formats.card import ModelCard

log = logging.getLogger(__name__)

# bump one when its stage's code changes what it writes
VERSIONS = {"preflight": 1, "dataset": 1, "states": 1, "training": 1, "draft": 1, "baseline": 1}
VERSIONS |= {"measurement": 1, "evaluation": 1}


class StageResult(StrictModel):
    """What a stage hands on: a reference and a few numbers, never data."""

    name: str
    ref: ArtifactRef
    cached: bool
    seconds: float
    summary: dict[str, Any]
    inputs: dict[str, str] = Field(default_factory=dict, description="digests of what went in, by name")


class NotProduced(DraftsmithError):
    """Raised instead of working when a run only looks (`status`, `--dry-run`)."""


@dataclass(frozen=True)
class Run:
    """A recipe with its surroundings: state root, store, and what was read once.

    only_look: find results, never make them · watch: entered, with the workspace, around a stage's work.
    """

    recipe: Recipe
    home: Path
    only_look: bool = False
    progress: ProgressCallback | None = None
    watch: Callable[[Path], AbstractContextManager[Any]] | None = None

    @cached_property
    def store(self) -> Store:
        """The artifact store under the state root."""
        return Store(os.environ.get("DRAFTSMITH_STORE") or str(self.home / "store"), scratch=self.home / "scratch")

    @cached_property
    def verifier(self) -> Path:
        """The verifier's directory, absolute."""
        return Path(self.recipe.verifier.path).absolute()

    @cached_property
    def facts(self) -> VerifierFacts:
        """Sizes and conventions read from the verifier's config.json."""
        return read_facts(self.verifier)

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """Digest of all that makes a draft stale."""
        return fingerprint(self.verifier, home=self.home, template_kwargs=self.recipe.data.template_kwargs)

    @cached_property
    def runtime(self) -> RuntimeInfo:
        """Version, build, device and model runner of the vLLM in use."""
        return probe_runtime(self.recipe.runtime, home=self.home)

    @cached_property
    def aux_layers(self) -> tuple[int, ...]:
        """Auxiliary layers that the algorithm reads."""
        algorithm = registry.resolve(str(self.recipe.algorithm["kind"]))
        return algorithm.aux_layers(self.recipe.algorithm_config(), self.facts.num_hidden_layers)

    @cached_property
    def layer_ids(self) -> tuple[int, ...]:
        """Captured layers: the auxiliary ones and the last."""
        return (*self.aux_layers, self.facts.num_hidden_layers)


# ------------------------------------------------------------------------------------------------------- the stages


def preflight(run: Run) -> StageResult:
    """Serve an untrained draft of this shape for a few tokens: what cannot be served fails in the first minute."""
    from speculators_core.preflight import check_inputs, serve_untrained

    check_inputs(run.recipe, run.facts, run.verifier, run.layer_ids)
    inputs = {"verifier config": run.fingerprint.parts["config"], "runtime": run.runtime.key}
    key = input_digest("preflight", VERSIONS["preflight"], {**inputs, "draft": draft_shape(run)})
    return produce(
        run, "preflight", "preflight", key, inputs, lambda workspace: serve_untrained(run.recipe, run.home, workspace)
    )


def prepare(run: Run) -> StageResult:
    """Conversations, through this tokenizer and template, become token rows with loss masks."""
    from speculators_core.data import prepare as data

    config = run.recipe.data
    inputs = {
        "sources": data.digest_sources(config.sources, home=run.home),
        "tokenizer": run.fingerprint.parts["tokenizer"],
        "chat template": run.fingerprint.parts["chat_template"],
    }
    settings = {"config": config.model_dump(mode="json", exclude={"sources"}), "versions": versions("transformers")}
    key = input_digest("prepare", VERSIONS["dataset"], {**inputs, **settings})

    def build(workspace: Path) -> dict[str, Any]:
        return data.prepare(config, run.verifier, workspace, progress=run.progress).model_dump(mode="json")

    return produce(run, "prepare", "dataset", key, inputs, build)


def capture(run: Run, dataset: ArtifactRef) -> StageResult:
    """These rows through this verifier on this runtime: hidden states at the draft's layers and the last."""
    from speculators_core.states.capture import capture_rows

    config = run.recipe.capture
    inputs = {
        "dataset": dataset.digest,
        "verifier": run.fingerprint.digest,
        "capture": capture_key(run.fingerprint, run.runtime.key, run.layer_ids, config.dtype),
    }
    key = input_digest("capture", VERSIONS["states"], {**inputs, "source": config.source})

    def build(workspace: Path) -> dict[str, Any]:
        rows = RowSet.open(run.store.path(dataset))
        report = capture_rows(
            rows,
            run.recipe.runtime,
            run.layer_ids,
            run.fingerprint.digest,
            config,
            workspace,
            verifier_dir=run.verifier,
            home=run.home,
            trust_remote_code=run.recipe.verifier.trust_remote_code,
            check=lambda engine: require_same_rendering(run, rows, engine),
            progress=run.progress,
        )
        return report.model_dump(mode="json")

    return produce(run, "capture", "states", key, inputs, build)


def train(run: Run, states: ArtifactRef) -> StageResult:
    """This algorithm on these states, in a process of its own."""

    inputs = {"states": states.digest, "verifier": run.fingerprint.digest}
    settings = {
        "draft": draft_shape(run),
        "training": run.recipe.training.model_dump(mode="json"),
        "versions": versions("torch"),
    }
    key = input_digest("train", VERSIONS["training"], {**inputs, **settings})

    def build(workspace: Path) -> dict[str, Any]:
        return run_trainer(run, train_request(run, run.store.path(states), workspace))

    return produce(run, "train", "training", key, inputs, build)


def export(run: Run, training: ArtifactRef) -> StageResult:
    """The best checkpoint as vLLM loads it, under the verifier's published name."""
    from speculators_core import build as trainer

    publish = run.recipe.verifier.publish_as or str(run.verifier)
    card = model_card(run)
    inputs = {"training": training.digest, "verifier": run.fingerprint.digest}
    key = input_digest("export", VERSIONS["draft"], {**inputs, "name": publish, "card": card.model_dump(mode="json")})

    def build(workspace: Path) -> dict[str, Any]:
        trained = run.store.path(training)
        trainer.export(train_request(run, Path(), trained), trained, publish, workspace, card)
        return {"verifier": publish, "algorithm": str(run.recipe.algorithm["kind"])}

    return produce(run, "export", "draft", key, inputs, build)


def baseline(run: Run, dataset: ArtifactRef) -> StageResult:
    """The verifier alone on the held-back prompts: what a draft's output and speed are held against."""
    from speculators_core.evaluation.measure import measure_baseline

    config = run.recipe.evaluation
    inputs = measured_with(run, dataset)
    key = input_digest("baseline", VERSIONS["baseline"], {**inputs, "config": config.run_inputs(speculation=False)})

    def build(workspace: Path) -> dict[str, Any]:
        found = measure_baseline(
            run.verifier,
            RowSet.open(run.store.path(dataset)).prompts(),
            run.recipe.runtime,
            config,
            home=run.home,
            output=workspace,
            verifier_fingerprint=run.fingerprint.digest,
            trust_remote_code=run.recipe.verifier.trust_remote_code,
            progress=run.progress,
        )
        return {"tokens_per_second": found.tokens_per_second, "prompts": found.count, "tokens": found.tokens}

    return produce(run, "baseline", "baseline", key, inputs, build)


def measure(run: Run, draft_dir: Path, digest: str, dataset: ArtifactRef) -> StageResult:
    """A draft on the held-back prompts: what the engine counted. `digest` names the draft's bytes."""
    from speculators_core.evaluation.measure import measure_draft

    config = run.recipe.evaluation
    alone = baseline(run, dataset)
    inputs = {**measured_with(run, dataset), "draft": digest}
    key = input_digest("measure", VERSIONS["measurement"], {**inputs, "config": config.run_inputs(speculation=True)})

    def build(workspace: Path) -> dict[str, Any]:
        found = measure_draft(
            draft_dir,
            run.verifier,
            RowSet.open(run.store.path(dataset)).prompts(),
            run.recipe.runtime,
            config,
            home=run.home,
            output=workspace,
            verifier_fingerprint=run.fingerprint.digest,
            baseline=run.store.path(alone.ref),
            trust_remote_code=run.recipe.verifier.trust_remote_code,
            progress=run.progress,
        )
        return {"k": found.k, "al": 1 + found.accepted / found.drafts, "prompts": found.count, "tokens": found.tokens}

    return produce(run, "measure", "measurement", key, inputs, build)


def evaluate(run: Run, draft_dir: Path, digest: str, dataset: ArtifactRef) -> StageResult:
    """Acceptance, losslessness and speed of a draft, as a report with plots."""
    from speculators_core.evaluation.compare import compare

    alone = baseline(run, dataset)
    measured = measure(run, draft_dir, digest, dataset)
    inputs = {"baseline": alone.ref.digest, "measurement": measured.ref.digest}
    config = run.recipe.evaluation.model_dump(mode="json")
    key = input_digest("evaluate", VERSIONS["evaluation"], {**inputs, "config": config})

    def build(workspace: Path) -> dict[str, Any]:
        paths = run.store.path(alone.ref), run.store.path(measured.ref)
        report = compare(*paths, run.recipe.evaluation, workspace)
        return report.model_dump(mode="json", include={"identity", "acceptance", "lossless", "speed"})

    result = produce(run, "evaluate", "evaluation", key, inputs, build)
    seconds = alone.seconds + measured.seconds + result.seconds
    return result.model_copy(update={"seconds": seconds, "cached": alone.cached and measured.cached and result.cached})


def evaluate_exported(run: Run, draft: ArtifactRef, dataset: ArtifactRef) -> StageResult:
    """`evaluate` for a draft of our own store."""
    return evaluate(run, run.store.path(draft), draft.digest, dataset)


ORDER = ("preflight", "prepare", "capture", "train", "export", "evaluate")


def run_until(run: Run, last: str) -> Iterator[StageResult]:
    """The stages in order, up to and with `last`; each is done when it is yielded."""
    results: dict[str, StageResult] = {}
    steps: dict[str, Callable[[], StageResult]] = {
        "preflight": lambda: preflight(run),
        "prepare": lambda: prepare(run),
        "capture": lambda: capture(run, results["prepare"].ref),
        "train": lambda: train(run, results["capture"].ref),
        "export": lambda: export(run, results["train"].ref),
        "evaluate": lambda: evaluate_exported(run, results["export"].ref, results["prepare"].ref),
    }
    assert tuple(steps) == ORDER
    for name in ORDER[: ORDER.index(last) + 1]:
        results[name] = steps[name]()
        yield results[name]


def read_evaluation(run: Run, evaluation: ArtifactRef) -> EvaluationReport:
    """The report behind an evaluation's reference, with its counts by prompt."""
    from speculators_core.evaluation.report import read_report

    return read_report(run.store.path(evaluation))


# --------------------------------------------------------------------------------------------------------- their keys


def measured_with(run: Run, dataset: ArtifactRef) -> dict[str, str]:
    """Inputs of every measurement: prompts, verifier and runtime."""
    return {"dataset": dataset.digest, "verifier": run.fingerprint.digest, "runtime": run.runtime.key}


def require_same_rendering(run: Run, rows: RowSet, engine: Engine) -> None:
    """The first rung of parity: the engine makes the same token ids of our messages. DataError when it doesn't."""
    from speculators_core.data.check import check_against_engine

    with engine.client() as client:
        check_against_engine(rows, client, template_kwargs=run.recipe.data.template_kwargs).require()


def train_request(run: Run, states: Path, output: Path) -> TrainRequest:
    """What the training process is told."""
    from speculators_core.build import TrainRequest

    return TrainRequest(
        states=str(states),
        verifier=str(run.verifier),
        algorithm=run.recipe.algorithm,
        training=run.recipe.training,
        draft_vocabulary_size=run.recipe.draft_vocabulary,
        output=str(output),
    )


def run_trainer(run: Run, request: TrainRequest) -> dict[str, Any]:
    """Train in a supervised process: it ends with us, and its limit and signals act on it.

    Raises:
        Interrupted, TrainingError, …: what the process says of its end.
    """
    from speculators_core import build as trainer
    from speculators_core.processes import supervise

    output = Path(request.output)
    scratch = run.home / "scratch" / "train"
    scratch.mkdir(parents=True, exist_ok=True)
    request_file = scratch / f"{output.parent.name[:16]}.json"
    request_file.write_text(request.model_dump_json(indent=1))
    log_file = run.home / "logs" / f"trainer-{time.strftime('%Y%m%d-%H%M%S')}-{output.parent.name[:6]}.log"
    log.info("training log=%s", log_file)
    with supervise(trainer.train_command(request_file), name="trainer", home=run.home, log=log_file) as process:
        try:
            while process.poll() is None:
                if run.progress is not None and (reached := trainer.read_progress(output)) is not None:
                    run.progress(*reached)
                time.sleep(0.5)
        except KeyboardInterrupt:
            process.stop(grace_s=20)  # SIGTERM: it saves a checkpoint and goes
            raise
    return trainer.read_outcome(output).model_dump(mode="json")


def model_card(run: Run) -> ModelCard:
    """What the draft's card says beyond its config."""
    from speculators_core.formats.card import ModelCard

    verifier = run.recipe.verifier
    return ModelCard(
        title=f"{run.recipe.deployment}: {run.recipe.algorithm['kind']} draft",
        verifier_license=verifier.license,
        data_license=run.recipe.export.data_license,
        verifier_fingerprint=run.fingerprint.digest,
        facts={"verifier revision": verifier.revision} if verifier.revision else {},
    )


def draft_shape(run: Run) -> dict[str, Any]:
    """What decides the draft's tensors: algorithm, knobs, vocabulary."""
    return {
        "algorithm": run.recipe.algorithm_config().model_dump(mode="json"),
        "vocabulary": run.recipe.draft_vocabulary,
    }


def produce(
    run: Run,
    stage: str,
    kind: str,
    key: str,
    inputs: Mapping[str, str],
    build: Callable[[Path], Mapping[str, Any]],
) -> StageResult:
    """Find the artifact of this key, or build it in a workspace that survives a kill, and publish it.

    Args:
        build: writes the files into the workspace and returns the artifact's metadata (JSON).
    """
    start = time.monotonic()

    def result(ref: ArtifactRef, *, cached: bool) -> StageResult:
        summary = dict(run.store.manifest(ref).meta)
        seconds = time.monotonic() - start
        log.info("stage=%s %s seconds=%.1f", stage, "cached" if cached else "done", seconds)
        return StageResult(name=stage, ref=ref, cached=cached, seconds=seconds, summary=summary, inputs=dict(inputs))

    if found := run.store.find(kind, key):
        return result(found, cached=True)
    if run.only_look:
        raise NotProduced(f"{stage} has not been run for these inputs")
    with run.store.single_flight(kind, key):
        if found := run.store.find(kind, key):  # another process finished it while we waited
            return result(found, cached=True)
        workspace = run.store.workspace(kind, key)
        log.info("stage=%s start", stage)
        with run.watch(workspace) if run.watch else nullcontext():
            meta = dict(build(workspace))
        return result(run.store.publish(workspace, kind, key, meta, producer=versions()), cached=False)
