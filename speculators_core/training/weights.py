"""Which of a model's tensors training owns: the trainable parameters and the persistent buffers.

Frozen parameters (embedding, head, final norm) belong to the verifier: they are never saved with a run, and a warm
start never takes them from the old draft.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from speculators_core.errors import ConfigError, TrainingError
from speculators_core.training import checkpoints

log = logging.getLogger(__name__)

WEIGHTS = "model.safetensors"
VOCABULARY_MODULES = ("embed_tokens", "lm_head")


def trained_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Trainable parameters and persistent buffers by name (views, nothing copied)."""
    every = model.named_parameters(remove_duplicate=False)  # a frozen head may be known by two names
    frozen = {name for name, parameter in every if not parameter.requires_grad}
    return {name: value.detach() for name, value in model.state_dict().items() if name not in frozen}


@torch.no_grad()
def load_trained_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put `trained_tensors` back. TrainingError names what is missing, unknown, or of another shape."""
    mine = trained_tensors(model)
    problems = [*_misfits(mine, tensors), *(f"{name} is unknown" for name in tensors.keys() - mine.keys())]
    if problems:
        raise TrainingError(
            f"these weights are of another draft: {'; '.join(sorted(problems)[:4])}",
            mend="use the algorithm settings that they were trained with, or start without them",
        )
    for name, value in mine.items():
        value.copy_(tensors[name])


def start_from(
    model: nn.Module,
    source: Path,
    *,
    head: bool = True,
    names: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = lambda tensors: tensors,
    additions: Sequence[str] = (),
) -> None:
    """Warm start: trainable weights from a checkpoint or an exported draft; frozen parts stay the new verifier's.

    Args:
        head: False keeps the model's own tables over tokens also where they are trained: their rows would mean other
            tokens. Another choice of draft vocabulary keeps those over draft ids, by itself.
        names: an exported draft's tensors by the model's own names.
        additions: beginnings of names of tensors that the draft may lack: the model keeps its own.

    Raises:
        TrainingError: it is torn.
        ConfigError: there are no weights, or they are of another shape.
    """
    if not (source / WEIGHTS).is_file():
        raise ConfigError(f"training.warm_start: {source} holds no {WEIGHTS}", mend="name a draft or a checkpoint")
    if (source / checkpoints.MANIFEST).is_file():
        tensors: Mapping[str, Tensor] = checkpoints.load(source).tensors["model"]
    else:
        try:
            tensors = names(safetensors.torch.load_file(source / WEIGHTS))
        except SafetensorError as error:
            raise TrainingError(
                f"training.warm_start: {source / WEIGHTS} cannot be read: {error}", mend="copy the draft again"
            ) from error
    mine, theirs = getattr(model, "d2t", None), tensors.get("d2t")
    same_tokens = mine is theirs if mine is None or theirs is None else torch.equal(mine.cpu(), theirs)
    added = {n for n, _ in model.named_parameters() if n not in tensors and n.startswith(tuple(additions))}
    tables = {n for n, over_drafts in vocabulary_tables(model).items() if not head or (over_drafts and not same_tokens)}
    count = _load_trainable(model, tensors, own=added | tables)
    log.info("warm start from=%s parameters=%d fresh=%s", source, count, ",".join(sorted(added)) or "none")


def vocabulary_tables(model: nn.Module) -> dict[str, bool]:
    """Parameters with a row for each token, by name: whether for each that the draft can propose, or for all of them.

    An embedding, a module named embed_tokens or lm_head, or a parameter marked `is_vocabulary = True`; of linear
    layers, rows are draft ids.
    """
    found = {}
    for path, module in model.named_modules():
        known = isinstance(module, nn.Embedding) or path.rsplit(".", 1)[-1] in VOCABULARY_MODULES
        for name, parameter in module.named_parameters(recurse=False):
            if known or getattr(parameter, "is_vocabulary", False):
                found[f"{path}.{name}" if path else name] = isinstance(module, nn.Linear)
    return found


@torch.no_grad()
def _load_trainable(model: nn.Module, tensors: Mapping[str, Tensor], *, own: Collection[str] = frozenset()) -> int:
    """Copy every trainable parameter of `model` but its `own` from `tensors`; all else in `tensors` is left alone.

    Returns the number of parameters copied. ConfigError when one is missing or has another shape.
    """
    trainable = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad and name not in own
    }
    if problems := _misfits(trainable, tensors):
        raise ConfigError(
            f"training.warm_start: the draft to start from does not fit: {'; '.join(sorted(problems)[:4])}",
            mend="use the same algorithm settings as that draft, or remove training.warm_start",
        )
    for name, parameter in trainable.items():
        parameter.copy_(tensors[name])
    return len(trainable)


def _misfits(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> list[str]:
    """What keeps `found` from filling `wanted`: a phrase for each tensor that is missing or of another shape."""
    missing = [f"{name} is missing" for name in wanted.keys() - found.keys()]
    return missing + [
        f"{name} is {tuple(found[name].shape)}, not {tuple(wanted[name].shape)}"
        for name in wanted.keys() & found.keys()
        if found[name].shape != wanted[name].shape
    ]
