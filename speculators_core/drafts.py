"""Drafts as vLLM loads them: of a finished training, or untrained, of the shape that settings ask for."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from speculators_core import registry
from speculators_core.errors import ConfigError
from speculators_core.training.request import BEST, VOCABULARY, TrainRequest
from speculators_core.types import Algorithm, StrictModel

if TYPE_CHECKING:
    from speculators_core.data.vocabulary import DraftVocabulary
    from speculators_core.formats.card import ModelCard


def algorithm_of(settings: dict[str, Any]) -> tuple[Algorithm, StrictModel]:
    """The algorithm that `settings` names by `kind`, and its typed configuration. ConfigError when either is wrong."""
    if "kind" not in settings:
        raise ConfigError("algorithm names no `kind`", mend=f"one of {', '.join(sorted(registry.names()))}")
    algorithm = registry.resolve(str(settings["kind"]))
    try:
        return algorithm, algorithm.config.model_validate(settings)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "algorithm"
        raise ConfigError(f"algorithm setting {where}: {first['msg']}") from error


def export(request: TrainRequest, training: Path, publish: str, target: Path, card: ModelCard) -> Path:
    """Write the best weights of a finished run as vLLM loads them: config.json, model.safetensors, README.md.

    Args:
        training: output directory of the run (wherever it lies now).
        publish: name of the verifier to write into the draft: a hub id, or a path.
        target: the draft's directory.

    Raises:
        TrainingError: the weights are torn.
        FormatError: vLLM would not serve it.
    """
    import safetensors.torch

    from speculators_core.data.vocabulary import DraftVocabulary
    from speculators_core.formats.directory import write_draft
    from speculators_core.training import checkpoints
    from speculators_core.training.weights import load_trained_tensors

    algorithm, settings = algorithm_of(request.algorithm)
    vocabulary = None
    if (training / VOCABULARY).is_file():
        vocabulary = DraftVocabulary(**safetensors.torch.load_file(training / VOCABULARY))
    model = algorithm.build(settings, Path(request.verifier), vocabulary, request.training.seed)
    load_trained_tensors(model, checkpoints.load(training / BEST).tensors["model"])
    return write_draft(target, algorithm.export(settings, model, publish), card)


def export_untrained(
    algorithm_settings: dict[str, Any], verifier: Path, draft_vocabulary_size: int | None, publish: str, target: Path,
    card: ModelCard,
) -> Path:  # fmt: skip
    """Write a draft of this shape with random weights: what a pre-flight loads before the expensive part begins."""
    from speculators_core.formats.directory import write_draft

    algorithm, settings = algorithm_of(algorithm_settings)
    model = _untrained(algorithm, settings, verifier, draft_vocabulary_size)
    return write_draft(target, algorithm.export(settings, model, publish), card)


def try_warm_start(
    algorithm_settings: dict[str, Any], verifier: Path, draft_vocabulary_size: int | None, start: Path, *, head: bool
) -> None:
    """Start an untrained draft of this shape from that one, and forget it: what cannot be done is known at once.

    Raises:
        ConfigError: it is of another algorithm, or of another shape.
        FormatError, TrainingError: it is no draft, or torn.
    """
    from speculators_core.formats.directory import read_config
    from speculators_core.training.weights import start_from

    algorithm, settings = algorithm_of(algorithm_settings)
    kind, kinds = read_config(start).get("speculators_model_type"), (algorithm.name, *algorithm.starts_from)
    if kind not in kinds:
        raise ConfigError(
            f"training.warm_start: {start} is a draft of {kind}, but algorithm.kind is {algorithm.name}",
            mend=f"name a draft of {' or '.join(kinds)}, or remove training.warm_start",
        )
    model = _untrained(algorithm, settings, verifier, draft_vocabulary_size)
    start_from(model, start, head=head, names=partial(algorithm.names, settings), additions=algorithm.additions)


def _untrained(algorithm: Algorithm, settings: StrictModel, verifier: Path, draft_vocabulary_size: int | None) -> Any:
    import torch

    from speculators_core.data.vocabulary import select_draft_vocabulary
    from speculators_core.verifier.facts import read_facts

    verifier_size = read_facts(verifier).vocab_size
    vocabulary = None
    if draft_vocabulary_size is not None and draft_vocabulary_size != verifier_size:
        counts = torch.ones(verifier_size, dtype=torch.int64)
        vocabulary = select_draft_vocabulary(counts, draft_vocabulary_size, verifier_size)
    return algorithm.build(settings, verifier, vocabulary, 0)


def read_vocabulary(draft: Path) -> DraftVocabulary | None:
    """The draft vocabulary of an exported draft; None where it proposes every token (or is a checkpoint)."""
    import safetensors

    from speculators_core.data.vocabulary import DraftVocabulary
    from speculators_core.training.weights import WEIGHTS

    with safetensors.safe_open(draft / WEIGHTS, framework="pt") as file:
        if not {"d2t", "t2d"} <= set(file.keys()):
            return None
        return DraftVocabulary(d2t=file.get_tensor("d2t"), t2d=file.get_tensor("t2d"))
