"""Composition root of training: from states, a verifier and settings to weights. It sees every part of training.

Trains in this process; `training_process` is the child process around it. `drafts` makes a draft of what it leaves.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speculators_core.drafts import algorithm_of, read_vocabulary
from speculators_core.errors import ConfigError, TrainingError
from speculators_core.training.config import TrainingConfig
from speculators_core.training.request import (
    BEST,
    IDENTITY,
    METRICS,
    RESULT,
    VOCABULARY,
    TrainReport,
    TrainRequest,
    write_json,
)
from speculators_core.types import Algorithm, StrictModel

if TYPE_CHECKING:
    from speculators_core.data.vocabulary import DraftVocabulary
    from speculators_core.training.distributed import World
    from speculators_core.training.loader import States
    from speculators_core.training.trainer import Trainer

log = logging.getLogger(__name__)


def train(request: TrainRequest) -> TrainReport:
    """Train in this process (one rank of several under torchrun), going on from what the output directory holds.

    Raises:
        Interrupted: a signal came; progress is saved.
        TrainingError, ConfigError, VerifierError, DataError, CaptureError, StoreError: see their texts.
    """
    from speculators_core.training.distributed import join

    output = Path(request.output)
    require_same_run(request)
    finished = output / RESULT
    if finished.is_file():
        log.info("training is finished already: %s", finished)
        return TrainReport.model_validate_json(finished.read_text())
    config = request.training
    _set_threads(config)
    with join(config.device) as world, ExitStack() as held:
        with world.one_fate():
            if world.is_main:
                held.enter_context(sole_trainer(output))
            states = held.enter_context(reading(request))
        trainer, clipped, fill = _assemble(request, world, states)
        trainer.fit()
        report = _report(request, trainer, clipped, fill)
        if world.is_main:
            _finish(output, config, report)
        world.barrier()
    return report


def require_same_run(request: TrainRequest) -> None:
    """Claim the output directory for this request, or check that it is claimed for it.

    Training settings are left to the checkpoint, which knows which of them may change on the way.

    Raises:
        TrainingError: it holds the run of other states, or of another draft.
        CaptureError: there is no finished hidden-state set.
    """
    _, settings = algorithm_of(request.algorithm)
    identity = {
        "states": states_identity(request),
        "algorithm": settings.model_dump(mode="json"),
        "draft_vocabulary_size": request.draft_vocabulary_size,
        "warm_start": request.warm_start is not None,
    }
    path = Path(request.output) / IDENTITY
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, json.dumps(identity, indent=1))
        return
    claimed = json.loads(path.read_text())
    other = sorted(name for name, value in identity.items() if claimed.get(name) != value)
    if other:
        raise TrainingError(
            f"{request.output} holds a run with other {', '.join(other)}", mend="train into a fresh output directory"
        )


def states_identity(request: TrainRequest) -> dict[str, Any]:
    """What states a request trains on, in words that outlive where they lie. CaptureError: there is no finished set."""
    from speculators_core.states.sets import INDEX_NAME, SetIndex, StateSet

    if request.online is not None:
        from speculators_core.states.online import facts_of

        return {**facts_of(request.online).model_dump(mode="json"), "rows": request.online.dataset_digest}
    facts = StateSet.open(Path(request.states)).facts
    index = SetIndex.model_validate_json((Path(request.states) / INDEX_NAME).read_bytes())
    return {**facts.model_dump(mode="json"), "rows": index.rows_digest}


@contextmanager
def sole_trainer(output: Path) -> Iterator[None]:
    """Hold an output directory that is claimed already; the hold ends with this process, however it ends.

    Raises:
        TrainingError: another process trains there.
    """
    from speculators_core.store.use import only_holder

    with only_holder(output / IDENTITY) as alone:
        if not alone:
            raise TrainingError(f"another process trains into {output}", mend="wait for its end, or end it first")
        yield


def _assemble(request: TrainRequest, world: World, states: States) -> tuple[Trainer, int, float]:
    """Everything wired together and, when the output holds a checkpoint, restored."""
    import torch

    from speculators_core.training.callbacks.checkpointing import Checkpointing
    from speculators_core.training.callbacks.metrics_log import MetricsLog
    from speculators_core.training.callbacks.progress import ProgressReport
    from speculators_core.training.callbacks.signals import Signals
    from speculators_core.training.callbacks.validating import Validating
    from speculators_core.training.loader import PackedRows
    from speculators_core.training.trainer import Trainer
    from speculators_core.training.validation import Validator
    from speculators_core.training.weights import start_from

    config, output = request.training, Path(request.output)
    output.mkdir(parents=True, exist_ok=True)
    algorithm, settings = algorithm_of(request.algorithm)
    vocabulary = _draft_vocabulary(request, states, world)
    model = algorithm.build(settings, Path(request.verifier), vocabulary, config.seed)
    if request.warm_start is not None:
        start_from(
            model,
            Path(request.warm_start),
            head=request.warm_head,
            names=partial(algorithm.names, settings),
            additions=algorithm.additions,
        )
    objective = algorithm.objective(settings)
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    with world.one_fate():  # each looks at a row
        rows = PackedRows(states, objective, "train", config.row_tokens, dtype=dtype)
        held_out = PackedRows(
            states, objective, "validation", config.row_tokens, dtype=dtype, limit=config.validation.max_rows
        )
    plan = rows.epoch_plan(config.seed, 0)
    if plan.clipped:
        log.warning("%d of %d rows are longer than row_tokens=%d and are clipped", plan.clipped, len(rows.lengths),
                    config.row_tokens)  # fmt: skip
    metrics_log = MetricsLog(output / METRICS, config.log_every_steps)
    validator = Validator(held_out, objective, config.validation, world)
    saving = Checkpointing(output / "checkpoints", config.checkpoint)
    trainer = Trainer(
        model, objective, rows, config, world=world, output=output,
        callbacks=(
            metrics_log,
            ProgressReport(),
            saving,
            Validating(validator, config.validation, output / BEST, metrics_log),
            Signals(),  # last: it hears them until all the others have finished
        ),
    )  # fmt: skip
    saving.resume(trainer)
    return trainer, plan.clipped, plan.fill(config.row_tokens)


@contextmanager
def reading(request: TrainRequest) -> Iterator[States]:
    """The states that a request trains on: a set, or engines that are asked; these end with the block."""
    algorithm, settings = algorithm_of(request.algorithm)
    if request.online is None:
        yield open_states(request, algorithm, settings)
        return
    from speculators_core.states.online import OnlineStates

    with closing(OnlineStates.open(request.online)) as streamed:
        yield wanted_layers(streamed, streamed.layer_ids, request, algorithm, settings)


def open_states(request: TrainRequest, algorithm: Algorithm, settings: StrictModel) -> States:
    """The set, reduced to the layers that the algorithm reads. ConfigError names layers that it does not hold."""
    from speculators_core.states.sets import StateSet

    states = StateSet.open(Path(request.states))
    return wanted_layers(states, states.layer_ids, request, algorithm, settings)


def wanted_layers(
    states: States, layer_ids: tuple[int, ...], request: TrainRequest, algorithm: Algorithm, settings: StrictModel
) -> States:
    """States of these layers, reduced to those that the algorithm reads. ConfigError names layers that are missing."""
    from speculators_core.training.loader import SomeLayers
    from speculators_core.verifier.facts import read_facts

    depth = read_facts(Path(request.verifier)).num_hidden_layers
    wanted = (*algorithm.aux_layers(settings, depth), depth)
    missing = [layer for layer in wanted if layer not in layer_ids]
    if missing:
        raise ConfigError(
            f"the hidden-state set {request.states} lacks layers {missing}; it holds {list(layer_ids)}",
            mend="capture again with these layers, or name captured ones in algorithm.aux_layers",
        )
    places = [layer_ids.index(layer) for layer in wanted]
    return states if places == list(range(len(layer_ids))) else SomeLayers(states, places)


def _draft_vocabulary(request: TrainRequest, states: States, world: World) -> DraftVocabulary | None:
    """The tokens that are given, those of the draft to start from, or the most frequent supervised ones.

    Kept in the output for the export.
    """
    from speculators_core.data.vocabulary import given_vocabulary, select_draft_vocabulary
    from speculators_core.verifier.facts import read_facts

    size = request.draft_vocabulary_size
    verifier_size = read_facts(Path(request.verifier)).vocab_size
    if size is None or size == verifier_size:
        return None
    counts = supervised_counts(states, verifier_size)
    vocabulary, chosen_by = select_draft_vocabulary(counts, size, verifier_size), "frequency"
    best = vocabulary.coverage(counts)
    if request.draft_vocabulary_from is not None:
        vocabulary = given_vocabulary(Path(request.draft_vocabulary_from), verifier_size, size)
        chosen_by = request.draft_vocabulary_from
    elif request.warm_start is not None and request.warm_head:
        known = read_vocabulary(Path(request.warm_start))
        if known is not None and (len(known.d2t), len(known.t2d)) == (size, verifier_size):
            vocabulary, chosen_by = known, "warm_start"
    log.info(
        "draft vocabulary by=%s covers=%.4f of the supervised tokens best=%.4f",
        chosen_by, vocabulary.coverage(counts), best,
    )  # fmt: skip
    if world.is_main:
        import safetensors.torch

        tensors = {"d2t": vocabulary.d2t, "t2d": vocabulary.t2d}
        safetensors.torch.save_file(tensors, Path(request.output) / VOCABULARY)
    return vocabulary


def supervised_counts(states: States, verifier_size: int) -> Any:
    """int64 [V]: how often each token is supervised in the training rows."""
    import torch

    counts = torch.zeros(verifier_size, dtype=torch.int64)
    for position, split in enumerate(states.splits):
        if split == "train":
            row = states.row(position)
            counts += torch.bincount(row.input_ids[row.loss_mask], minlength=verifier_size)
    return counts


def _report(request: TrainRequest, trainer: Trainer, clipped: int, fill: float) -> TrainReport:
    from speculators_core.training.callbacks.validating import Validating

    (validating,) = (callback for callback in trainer.callbacks if isinstance(callback, Validating))
    assert validating.best_report is not None and validating.best_step is not None
    position = trainer.position
    return TrainReport(
        steps=position.step,
        epochs=position.epoch,
        tokens=position.tokens,
        seconds=round(trainer.seconds, 2),
        tokens_per_s=round(position.tokens / max(trainer.seconds, 1e-9), 1),
        processes=trainer.world.size,
        clipped_rows=clipped,
        fill=round(fill, 4),
        best_step=validating.best_step,
        validation=validating.best_report.model_dump(mode="json"),
        stopped=trainer.stop_reason,
        warm_start=request.warm_start is not None,
        trainable_parameters=sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
    )


def _finish(output: Path, config: TrainingConfig, report: TrainReport) -> None:
    from speculators_core.training import checkpoints

    write_json(output / RESULT, report.model_dump_json(indent=1))
    if not config.checkpoint.keep_when_finished:
        checkpoints.prune(output / "checkpoints", 0)


def _set_threads(config: TrainingConfig) -> None:
    import torch

    processes = int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(config.threads or max(1, len(os.sched_getaffinity(0)) // processes))
    if config.deterministic:
        torch.use_deterministic_algorithms(True)
