"""The draft itself: whether one of its shape can be served, its training, and the directory that vLLM loads."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speculators_core.lifecycle.plan import Estimate
from speculators_core.provenance import versions
from speculators_core.run import Run, StageResult, WarmStart, produce
from speculators_core.stages.expected import train_estimate
from speculators_core.stages.states import captured_with
from speculators_core.stages.streaming import PLACE, streaming
from speculators_core.stages.versions import VERSIONS
from speculators_core.store import emptied, input_digest
from speculators_core.types import ArtifactRef, Json

if TYPE_CHECKING:
    from speculators_core.formats.card import ModelCard
    from speculators_core.training.request import TrainRequest

BEGAN = {"digest", "head"}
"""What is kept of a draft that training began from."""


def preflight(run: Run) -> StageResult:
    """Serve an untrained draft of this shape for a few tokens: what cannot be served fails in the first minute.

    A server that somebody else runs is asked instead whether it fits, and that every time.
    """
    if run.check:
        from speculators_core.preflight import check_inputs, check_sizes, check_warm_start

        check_sizes(run.recipe, run.facts)
        check_inputs(run.recipe, run.facts, run.verifier, run.layer_ids)
        if run.warm_start is not None and run.warm_start.path is not None:
            check_warm_start(run.recipe, run.verifier, Path(run.warm_start.path), head=run.warm_start.head)
    if not run.only_look:
        from speculators_core.remote import greet_servers
        from speculators_core.states.stores import check_store

        greet_servers(run)
        check_store(run.recipe.capture)
    inputs = {"verifier config": run.fingerprint.parts["config"], "runtime": run.runtime.key}
    settings: dict[str, Any] = {"draft": run.draft_shape}
    if run.recipe.export.allow_unservable:  # what was let through then is not let through without it
        settings["allow_unservable"] = True
    key = input_digest("preflight", VERSIONS["preflight"], {**inputs, **settings})

    def build(workspace: Path) -> dict[str, Any]:
        from speculators_core.preflight import serve_untrained

        if run.recipe.runtime.url is not None:
            return {"drafts": 0, "vllm": run.runtime.vllm}
        return serve_untrained(run.recipe, run.home, workspace)

    return produce(run, "preflight", "preflight", key, inputs, build, settings=settings)


def train(run: Run, states: ArtifactRef) -> StageResult:
    """This algorithm on these states, in a process of its own.

    `states` is a captured set, or the data set whose states are streamed, from engines that live as long as training.
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
        if states.kind == "dataset":
            cores = run.recipe.hidden_states.trainer_cores
            with streaming(run, states, workspace) as online:
                streamed = request.model_copy(update={"states": "", "online": online})
                report = run_training(streamed, run.home, run.advance, cores).model_dump(mode="json")
            shutil.rmtree(workspace / PLACE)
        else:
            report = run_training(request, run.home, run.advance).model_dump(mode="json")
        return {**report, "began_from": None if start is None else start.model_dump(mode="json", include=BEGAN)}

    def expected() -> Estimate:
        return train_estimate(run, run.store.manifest(states).meta.get("tokens"))

    return produce(run, "train", "training", key, inputs, build, settings=settings, expected=expected)


def export(run: Run, training: ArtifactRef) -> StageResult:
    """The best checkpoint as vLLM loads it, under the verifier's published name."""
    publish = run.published_name
    card = model_card(run)
    inputs = {"training": training.digest, "verifier": run.fingerprint.digest}
    settings: dict[str, Json] = {"name": publish, "card": card.model_dump(mode="json")}
    key = input_digest("export", VERSIONS["draft"], {**inputs, **settings})

    def build(workspace: Path) -> dict[str, Any]:
        from speculators_core import drafts

        trained = run.store.path(training)
        drafts.export(train_request(run, Path(), trained), trained, publish, emptied(workspace), card)
        began = run.store.manifest(training).meta.get("began_from")
        return {"verifier": publish, "algorithm": str(run.recipe.algorithm["kind"]), "began_from": began}

    return produce(run, "export", "draft", key, inputs, build, settings=settings)


def training_key(run: Run, states: ArtifactRef, start: WarmStart | None) -> tuple[dict[str, str], dict[str, Json], str]:
    """Inputs, settings and key of a training that begins from `start`: its digest counts, never where it lies.

    States that are streamed have no digest: what decides their content stands for it, not how they travel.
    """
    inputs, settings = {"states": states.digest, "verifier": run.fingerprint.digest}, dict[str, Json]()
    if states.kind == "dataset":
        inputs, settings = captured_with(run, states)
    settings |= {
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
        draft_vocabulary_from=run.recipe.draft_vocabulary_from,
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
