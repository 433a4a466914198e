"""The loop's stages as plain functions: each finds its result in the store or makes it.

    preflight → prepare → capture → train → export → evaluate

A stage's cache key is a digest of its inputs, its configuration, its hand-bumped version and the versions of
vllm, torch and transformers where they matter; never a path, a run id or a commit (decision of the design).
Two processes that ask for the same key compute it once; a killed stage goes on from its workspace.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speculators_core.data.conversations import read_conversations
from speculators_core.data.rows import RowSet
from speculators_core.provenance import versions
from speculators_core.run import Run, StageResult, WarmStart, produce
from speculators_core.store import input_digest
from speculators_core.types import ArtifactRef, Json
from speculators_core.verifier.fingerprint import capture_key

if TYPE_CHECKING:
    from speculators_core.engine.server import Engine
    from speculators_core.evaluation.report import EvaluationReport
    from speculators_core.evaluation.runs import Conditions
    from speculators_core.formats.card import ModelCard
    from speculators_core.training.request import TrainRequest

# bump one when its stage's code changes what it writes
VERSIONS = {"preflight": 1, "replies": 1, "dataset": 1, "states": 1, "training": 1, "draft": 1, "baseline": 1}
VERSIONS |= {"measurement": 1, "speed": 1, "evaluation": 1}

BEGAN = {"digest", "head"}
"""What is kept of a draft that training began from."""


def preflight(run: Run) -> StageResult:
    """Serve an untrained draft of this shape for a few tokens: what cannot be served fails in the first minute.

    A server that somebody else runs is asked instead whether it fits, and that every time.
    """
    if run.check:
        from speculators_core.preflight import check_inputs, check_warm_start

        check_inputs(run.recipe, run.facts, run.verifier, run.layer_ids)
        if run.warm_start is not None and run.warm_start.path is not None:
            check_warm_start(run.recipe, run.verifier, Path(run.warm_start.path), head=run.warm_start.head)
    if not run.only_look:
        from speculators_core.remote import greet_servers

        greet_servers(run)
    inputs = {"verifier config": run.fingerprint.parts["config"], "runtime": run.runtime.key}
    settings = {"draft": run.draft_shape}
    key = input_digest("preflight", VERSIONS["preflight"], {**inputs, **settings})

    def build(workspace: Path) -> dict[str, Any]:
        from speculators_core.preflight import serve_untrained

        if run.recipe.runtime.url is not None:
            return {"drafts": 0, "vllm": run.runtime.vllm}
        return serve_untrained(run.recipe, run.home, workspace)

    return produce(run, "preflight", "preflight", key, inputs, build, settings=settings)


def regenerate(run: Run) -> StageResult:
    """The verifier answers the conversations anew; the same requests leave its hidden states for `capture`."""
    from speculators_core.data import prepare as data

    config, engine = run.recipe.data, run.recipe.capture
    inputs = {
        "sources": data.digest_sources(config.sources, home=run.home),
        "verifier": run.fingerprint.digest,
        "runtime": run.capture_runtime.key,
    }
    settings: dict[str, Json] = {
        "regeneration": config.regeneration.model_dump(mode="json", exclude={"concurrency"}),
        **config.model_dump(mode="json", include={"max_rows", "max_length", "seed"}),
        "dtype": engine.dtype,
    }
    key = input_digest("regenerate", VERSIONS["replies"], {**inputs, **settings})

    def build(workspace: Path) -> dict[str, Any]:
        from speculators_core.states import replies

        runtime = engine.runtime or run.recipe.runtime
        longest = min(config.regeneration.max_context or config.max_length, config.max_length)
        records = records_of(run, key)
        report = replies.answer(
            data.draw(list(read_conversations(config.sources, Counter())), config),
            runtime,
            run.layer_ids,
            run.fingerprint.digest,
            engine,
            config.regeneration.model_copy(update={"max_context": longest}),
            records / replies.REPLIES,
            # a server that somebody else runs captures elsewhere; and some families vLLM cannot capture at all
            records=records if runtime.url is None and engine.source == "engine" else None,
            verifier_dir=run.verifier,
            home=run.home,
            template_kwargs=config.template_kwargs,
            trust_remote_code=run.recipe.verifier.trust_remote_code,
            progress=run.progress,
        )
        replies.publish_replies(records / replies.REPLIES, workspace / replies.REPLIES)
        return report.model_dump(mode="json")

    return produce(run, "regenerate", "replies", key, inputs, build, settings=settings)


def prepare(run: Run) -> StageResult:
    """Conversations, through this tokenizer and template, become token rows with loss masks.

    Where the recipe wants it, the verifier answers the conversations first.
    """
    from speculators_core.data import prepare as data

    config = run.recipe.data
    answered = regenerate(run) if config.replies == "regenerate" else None
    inputs = {
        "sources": data.digest_sources(config.sources, home=run.home) if answered is None else answered.ref.digest,
        "tokenizer": run.fingerprint.parts["tokenizer"],
        "chat template": run.fingerprint.parts["chat_template"],
    }
    kept = config.model_dump(mode="json", exclude={"sources", "replies", "regeneration"})
    settings = {"config": kept, "versions": versions("transformers")}
    key = input_digest("prepare", VERSIONS["dataset"], {**inputs, **settings})

    def build(workspace: Path) -> dict[str, Any]:
        from speculators_core.states.replies import REPLIES

        rows = config
        if answered is not None:
            rows = config.model_copy(update={"sources": (str(run.store.path(answered.ref) / REPLIES),)})
        return data.prepare(rows, run.verifier, workspace, progress=run.progress).model_dump(mode="json")

    result = produce(run, "prepare", "dataset", key, inputs, build, settings=settings)
    return result if answered is None else together(result, (answered, result))


def capture(run: Run, dataset: ArtifactRef) -> StageResult:
    """These rows through this verifier on this runtime: hidden states at the draft's layers and the last."""
    config = run.recipe.capture
    answered = regenerate(run) if run.recipe.data.replies == "regenerate" else None
    inputs = {
        "dataset": dataset.digest,
        "verifier": run.fingerprint.digest,
        "capture": capture_key(run.fingerprint, run.capture_runtime.key, run.layer_ids, config.dtype),
    }
    key = input_digest("capture", VERSIONS["states"], {**inputs, "source": config.source})
    # what the capture key is made of, by name
    settings: dict[str, Json] = {"source": config.source, "dtype": config.dtype, "layers": list(run.layer_ids)}
    settings["runtime"] = run.capture_runtime.key

    def build(workspace: Path) -> dict[str, Any]:
        from speculators_core.states.capture import capture_rows
        from speculators_core.states.replies import capture_answers

        rows = RowSet.open(run.store.path(dataset))
        records = None if answered is None else records_of(run, answered.ref.uri.rsplit("/", 1)[-1])
        report = (partial(capture_answers, records=records) if records is not None else capture_rows)(
            rows,
            config.runtime or run.recipe.runtime,
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
        if records is not None:
            shutil.rmtree(records, ignore_errors=True)  # they are in the set
        return report.model_dump(mode="json")

    return produce(run, "capture", "states", key, inputs, build, settings=settings)


def train(run: Run, states: ArtifactRef) -> StageResult:
    """This algorithm on these states, in a process of its own.

    Where the draft to start from is what this run would make (a recipe that starts from its own champion, run again),
    it is not trained further: the training that made it is found.
    """
    start, inputs, settings, key = run.warm_start, *training_key(run, states, run.warm_start)
    for before in start.before if start is not None else ():
        known = training_key(run, states, before)
        if run.store.find("training", known[-1]) is not None:
            start, inputs, settings, key = before, *known

    def build(workspace: Path) -> dict[str, Any]:
        from speculators_core.training_process import run_training

        request = train_request(run, run.store.path(states), workspace, start)
        report = run_training(request, run.home, run.progress).model_dump(mode="json")
        return {**report, "began_from": None if start is None else start.model_dump(mode="json", include=BEGAN)}

    return produce(run, "train", "training", key, inputs, build, settings=settings)


def export(run: Run, training: ArtifactRef) -> StageResult:
    """The best checkpoint as vLLM loads it, under the verifier's published name."""
    publish = run.published_name
    card = model_card(run)
    inputs = {"training": training.digest, "verifier": run.fingerprint.digest}
    settings: dict[str, Json] = {"name": publish, "card": card.model_dump(mode="json")}
    key = input_digest("export", VERSIONS["draft"], {**inputs, **settings})

    def build(workspace: Path) -> dict[str, Any]:
        from speculators_core import build as trainer

        trained = run.store.path(training)
        trainer.export(train_request(run, Path(), trained), trained, publish, workspace, card)
        began = run.store.manifest(training).meta.get("began_from")
        return {"verifier": publish, "algorithm": str(run.recipe.algorithm["kind"]), "began_from": began}

    return produce(run, "export", "draft", key, inputs, build, settings=settings)


def baseline(run: Run, dataset: ArtifactRef) -> StageResult:
    """The verifier alone on the held-back prompts: what a draft's output and speed are held against."""
    inputs = measured_with(run, dataset)
    settings = {"config": run.recipe.evaluation.run_inputs(speculation=False)}
    key = input_digest("baseline", VERSIONS["baseline"], {**inputs, **settings})

    def build(workspace: Path) -> dict[str, Any]:
        from speculators_core.evaluation.measure import measure_baseline

        found = measure_baseline(conditions(run, dataset), workspace)
        return {"tokens_per_second": found.tokens_per_second, "prompts": found.count, "tokens": found.tokens}

    return produce(run, "baseline", "baseline", key, inputs, build, settings=settings)


def measure(run: Run, draft_dir: Path, digest: str, dataset: ArtifactRef) -> StageResult:
    """A draft on the held-back prompts: what the engine counted. `digest` names the draft's bytes."""
    alone = baseline(run, dataset) if has_baseline(run) else None
    inputs = {**measured_with(run, dataset), "draft": digest}
    settings = {"config": run.recipe.evaluation.run_inputs(speculation=True)}
    key = input_digest("measure", VERSIONS["measurement"], {**inputs, **settings})

    def build(workspace: Path) -> dict[str, Any]:
        from speculators_core.evaluation.measure import measure_draft

        known = None if alone is None else run.store.path(alone.ref)
        found = measure_draft(draft_dir, conditions(run, dataset), workspace, baseline=known)
        return {"k": found.k, "al": 1 + found.accepted / found.drafts, "prompts": found.count, "tokens": found.tokens}

    return produce(run, "measure", "measurement", key, inputs, build, settings=settings)


def measure_ngram(run: Run, dataset: ArtifactRef) -> StageResult:
    """vLLM's n-gram look-up on the held-back prompts: what can be had without any draft."""
    inputs = measured_with(run, dataset)
    settings = {"config": run.recipe.evaluation.run_inputs(speculation=True)}
    key = input_digest("ngram", VERSIONS["measurement"], {**inputs, **settings})

    def build(workspace: Path) -> dict[str, Any]:
        from speculators_core.evaluation.measure import measure_ngram as measure_look_up

        found = measure_look_up(conditions(run, dataset), workspace)
        return {"k": found.k, "tokens_per_step": found.tokens_per_step, "prompts": found.count, "tokens": found.tokens}

    return produce(run, "ngram", "measurement", key, inputs, build, settings=settings)


def time_arms(run: Run, draft_dir: Path, digest: str, dataset: ArtifactRef) -> StageResult:
    """Speed with and without the draft, the arms alternating: an artifact of its own, since it costs two engines."""
    inputs = {**measured_with(run, dataset), "draft": digest}
    settings = {"config": run.recipe.evaluation.speed_inputs()}
    key = input_digest("speed", VERSIONS["speed"], {**inputs, **settings})

    def build(workspace: Path) -> dict[str, Any]:
        from speculators_core.evaluation.speed import measure_speed

        found = measure_speed(draft_dir, conditions(run, dataset), workspace)
        return {"ratios": {str(speed.concurrency): speed.ratio for speed in found.speeds}}

    return produce(run, "speed", "speed", key, inputs, build, settings=settings)


def evaluate(run: Run, draft_dir: Path, digest: str, dataset: ArtifactRef) -> StageResult:
    """Acceptance, losslessness and speed of a draft, as a report with plots."""
    parts = {"measurement": measure(run, draft_dir, digest, dataset)}
    if has_baseline(run):
        parts["baseline"] = baseline(run, dataset)
    if has_baseline(run) and run.recipe.gate.speed == "require":
        parts["speed"] = time_arms(run, draft_dir, digest, dataset)
    inputs = {name: part.ref.digest for name, part in parts.items()}
    settings = {"config": run.recipe.evaluation.model_dump(mode="json")}
    key = input_digest("evaluate", VERSIONS["evaluation"], {**inputs, **settings})

    def build(workspace: Path) -> dict[str, Any]:
        from speculators_core.evaluation.compare import compare

        paths = {name: run.store.path(part.ref) for name, part in parts.items()}
        report = compare(
            paths.get("baseline"), paths["measurement"], run.recipe.evaluation, workspace, speed=paths.get("speed")
        )
        return report.model_dump(mode="json", include={"identity", "acceptance", "lossless", "speed", "alternating"})

    result = produce(run, "evaluate", "evaluation", key, inputs, build, settings=settings)
    return together(result, (*parts.values(), result))


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


def together(result: StageResult, parts: Sequence[StageResult]) -> StageResult:
    """The last part's result, as long as all parts took, and found only where all were."""
    seconds, cached = sum(part.seconds for part in parts), all(part.cached for part in parts)
    return result.model_copy(update={"seconds": seconds, "cached": cached})


def records_of(run: Run, key: str) -> Path:
    """Where the records of regenerated replies lie until they are a set; other layers, another place."""
    return run.home / "records" / f"{key[:24]}-{'-'.join(map(str, run.layer_ids))}"


def measured_with(run: Run, dataset: ArtifactRef) -> dict[str, str]:
    """Inputs of every measurement: prompts, verifier and runtime."""
    return {"dataset": dataset.digest, "verifier": run.fingerprint.digest, "runtime": run.runtime.key}


def has_baseline(run: Run) -> bool:
    """Whether the verifier can be served alone: a server that somebody else runs serves the draft, and only that."""
    return run.recipe.runtime.url is None


def conditions(run: Run, dataset: ArtifactRef) -> Conditions:
    """What every run on the engine has in common, whatever draft it measures."""
    from speculators_core.evaluation.runs import Conditions

    return Conditions(
        verifier_dir=run.verifier,
        verifier_fingerprint=run.fingerprint.digest,
        prompts=RowSet.open(run.store.path(dataset)).prompts(),
        runtime=run.recipe.runtime,
        config=run.recipe.evaluation,
        home=run.home,
        trust_remote_code=run.recipe.verifier.trust_remote_code,
        progress=run.progress,
    )


def require_same_rendering(run: Run, rows: RowSet, engine: Engine) -> None:
    """The first rung of parity: the engine makes the same token ids of our messages. DataError when it doesn't."""
    from speculators_core.data.check import check_against_engine

    with engine.client() as client:
        check_against_engine(rows, client, template_kwargs=run.recipe.data.template_kwargs).require()


def training_key(run: Run, states: ArtifactRef, start: WarmStart | None) -> tuple[dict[str, str], dict[str, Json], str]:
    """Inputs, settings and key of a training that begins from `start`: its digest counts, never where it lies."""
    inputs = {"states": states.digest, "verifier": run.fingerprint.digest}
    settings: dict[str, Json] = {
        "draft": run.draft_shape,
        "training": run.recipe.training.model_dump(mode="json", exclude={"warm_start"}),
        "versions": versions("torch"),
    }
    if start is not None:
        inputs["warm start"] = start.digest
        settings["warm head"] = start.head
    return inputs, settings, input_digest("train", VERSIONS["training"], {**inputs, **settings})


def train_request(run: Run, states: Path, output: Path, start: WarmStart | None = None) -> TrainRequest:
    """What the training process is told."""
    from speculators_core.training.request import TrainRequest

    return TrainRequest(
        states=str(states),
        verifier=str(run.verifier),
        algorithm=run.recipe.algorithm,
        training=run.recipe.training.model_copy(update={"warm_start": None}),  # `start` is what it led to
        draft_vocabulary_size=run.recipe.draft_vocabulary,
        output=str(output),
        warm_start=None if start is None else start.path,
        warm_head=start is None or start.head,
    )


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
