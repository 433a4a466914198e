"""From conversations to hidden states: replies where they are to be made, token rows, capture."""

from __future__ import annotations

import math
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speculators_core.config import Recipe
from speculators_core.data.conversations import read_conversations
from speculators_core.data.rows import RowSet
from speculators_core.errors import ConfigError
from speculators_core.lifecycle.plan import Estimate
from speculators_core.provenance import versions
from speculators_core.run import Run, StageResult, produce, together
from speculators_core.stages.expected import capture_estimate
from speculators_core.stages.versions import VERSIONS
from speculators_core.store import input_digest
from speculators_core.types import ArtifactRef, Json
from speculators_core.verifier.fingerprint import capture_key

if TYPE_CHECKING:
    from speculators_core.engine.server import Engine

RECORDS = "records"
"""Directory of the state root with the states that came with regenerated replies."""


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
        records, states = records_of(run, key), run.recipe.hidden_states
        # sampled replies cannot be captured in the same request: streams do without
        wanted = not states.streamed or (states.mode == "hybrid" and not config.regeneration.temperature)
        conversations = list(read_conversations(config.sources))
        data.require_unchanged(config.sources, inputs["sources"], home=run.home)
        report = replies.answer(
            data.draw(conversations, config),
            runtime,
            run.layer_ids,
            run.fingerprint.digest,
            engine,
            config.regeneration.model_copy(update={"max_context": longest}),
            records / replies.REPLIES,
            # a server that somebody else runs captures elsewhere; and some families vLLM cannot capture at all
            records=records if runtime.url is None and engine.source == "engine" and wanted else None,
            most_bytes=states.cache_gib * 2**30 if states.streamed else math.inf,
            verifier_dir=run.verifier,
            home=run.home,
            template_kwargs=config.template_kwargs,
            trust_remote_code=run.recipe.verifier.trust_remote_code,
            progress=run.advance,
        )
        replies.publish_replies(records / replies.REPLIES, workspace / replies.REPLIES)
        return report.model_dump(mode="json")

    return produce(run, "regenerate", "replies", key, inputs, build, settings=settings)


def prepare(run: Run) -> StageResult:
    """Conversations, through this tokenizer and template, become token rows with loss masks.

    Where the recipe wants it, the verifier answers the conversations first.

    Raises:
        ConfigError, DataError: the algorithm could not learn from these rows, or would confuse their tokens.
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

        rows, when_read = config, None
        if answered is not None:
            rows = config.model_copy(update={"sources": (str(run.store.path(answered.ref) / REPLIES),)})
        else:
            when_read = partial(data.require_unchanged, config.sources, inputs["sources"], home=run.home)
        report = data.prepare(rows, run.verifier, workspace, when_read=when_read, progress=run.progress)
        return report.model_dump(mode="json")

    result = produce(run, "prepare", "dataset", key, inputs, build, settings=settings)
    if run.check:
        from speculators_core.preflight import check_rows

        check_rows(run.recipe, run.verifier, RowSet.open(run.store.path(result.ref)))
    return result if answered is None else together(result, (answered, result))


def require_prompts(recipe: Recipe, dataset: StageResult) -> StageResult:
    """The data set itself, where it holds back as many prompts as the gate asks for.

    Raises:
        ConfigError: fewer; training would end at a gate that nothing can pass.
    """
    held_back, needed = int(dataset.summary["splits"]["evaluation"]), recipe.gate.min_prompts
    usable = min(held_back, recipe.evaluation.max_prompts)
    if usable < needed:
        raise ConfigError(
            f"{held_back} prompts are held back and {usable} of them evaluated, but gate.min_prompts asks for {needed}",
            mend="add conversations (at most a quarter of them is held back), raise data.evaluation_prompts and "
            "evaluation.max_prompts, or lower gate.min_prompts",
        )
    return dataset


def capture(run: Run, dataset: ArtifactRef) -> StageResult:
    """These rows through this verifier on this runtime: hidden states at the draft's layers and the last."""
    config = run.recipe.capture
    answered = run.recipe.data.replies == "regenerate"
    (inputs, settings), key = captured_with(run, dataset), capture_digest(run, dataset)

    def build(workspace: Path) -> dict[str, Any]:
        from speculators_core.states.capture import capture_rows
        from speculators_core.states.replies import capture_answers

        rows = RowSet.open(run.store.path(dataset))
        records = answers_of(run) if answered else None
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
            progress=run.advance,
        )
        if records is not None:
            shutil.rmtree(records, ignore_errors=True)  # they are in the set
        return report.model_dump(mode="json")

    def expected() -> Estimate:
        return capture_estimate(run, run.store.manifest(dataset).meta.get("tokens"))

    return produce(run, "capture", "states", key, inputs, build, settings=settings, expected=expected)


def capture_digest(run: Run, dataset: ArtifactRef) -> str:
    """The key of a capture."""
    inputs, settings = captured_with(run, dataset)
    decisive = {name: value for name, value in settings.items() if name in ("source", "codec")}
    return input_digest("capture", VERSIONS["states"], {**inputs, **decisive})


def captured_with(run: Run, dataset: ArtifactRef) -> tuple[dict[str, str], dict[str, Json]]:
    """Inputs and settings that decide the content of states, however and whenever they are captured."""
    config = run.recipe.capture
    inputs = {
        "dataset": dataset.digest,
        "verifier": run.fingerprint.digest,
        "capture": capture_key(run.fingerprint, run.capture_runtime.key, run.layer_ids, config.dtype),
    }
    # what the capture key is made of, by name
    settings: dict[str, Json] = {"source": config.source, "dtype": config.dtype, "layers": list(run.layer_ids)}
    settings["runtime"] = run.capture_runtime.key
    if config.codec != "none":
        settings["codec"] = config.codec
    return inputs, settings


def answers_of(run: Run) -> Path:
    """Where the requests that made this recipe's replies left their records."""
    return records_of(run, regenerate(run).ref.uri.rsplit("/", 1)[-1])


def records_of(run: Run, key: str) -> Path:
    """Where the records of regenerated replies lie until they are a set; other layers or codec, another place."""
    codec = run.recipe.capture.codec
    told = [*map(str, run.layer_ids), *([codec] if codec != "none" else [])]
    return run.home / RECORDS / f"{key[:24]}-{'-'.join(told)}"


def require_same_rendering(run: Run, rows: RowSet, engine: Engine) -> None:
    """The first rung of parity: the engine makes the same token ids of our messages. DataError when it doesn't."""
    from speculators_core.data.check import check_against_engine

    with engine.client() as client:
        check_against_engine(rows, client, template_kwargs=run.recipe.data.template_kwargs).require()
