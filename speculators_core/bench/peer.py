"""The peer's side of a bench: its copy of the states, vocabulary files, flags, and job of `peer_child.py`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speculators_core.bench.setup import BenchSettings, build_model
from speculators_core.training.request import TrainRequest

if TYPE_CHECKING:
    from speculators_core.training.loader import StateRow

# what every case shares; the batches of all epochs come as one, so one epoch is told
PEER_FLAGS = (
    "--draft-attn-impl sdpa --loss-implementation eager --hidden-states-dtype bfloat16 --mask-token-id 0 "
    "--weight-decay 0.01 --epochs 1 --checkpoint-freq 1 "
    "--num-workers 1 --on-missing raise --log-freq 1000000"
)


class _TrainFirst:
    """A set's rows with the training split in front, as the peer expects them."""

    def __init__(self, states: Any) -> None:
        splits = states.splits
        self._states = states
        self._order = sorted(range(len(splits)), key=lambda position: splits[position] != "train")
        self.splits = [splits[position] for position in self._order]

    def row(self, position: int) -> StateRow:
        row: StateRow = self._states.row(self._order[position])
        return row


def prepare_peer(
    settings: BenchSettings, flags: str, request: TrainRequest, batches: Sequence[Any], workspace: Path
) -> Path:
    """The peer's copy of the states, its vocabulary files and its job."""
    import numpy

    from speculators_core.states.peer import export_peer
    from speculators_core.states.sets import StateSet

    # beside the workspace, so that runs over the same states share the copy
    data = workspace.parent / f"peer-data-{hashlib.sha256(settings.states.encode()).hexdigest()[:16]}"
    states = StateSet.open(Path(settings.states))
    if not (data / "dataset_info.json").is_file():
        ordered: Any = _TrainFirst(states)
        export_peer(ordered, data)
    train_rows = states.splits.count("train")
    values = {
        "--verifier-name-or-path": settings.verifier,
        "--data-path": data,
        "--save-path": workspace / "peer-run",
        "--total-seq-len": settings.row_tokens,
        "--train-data-ratio": (train_rows + 0.5) / states.num_rows,
        "--lr": settings.learning_rate,
        "--seed": settings.seed,
        "--optimizer": settings.optimizer,
        "--scheduler-type": settings.schedule,
    }
    _, vocabulary = build_model(request)
    if vocabulary is not None:
        for name in ("d2t", "t2d"):
            numpy.save(workspace / f"{name}.npy", getattr(vocabulary, name).numpy())
            values[f"--{name}-path"] = workspace / f"{name}.npy"
        values["--draft-vocab-size"] = settings.draft_vocabulary
    if settings.schedule != "none":
        values |= {"--scheduler-warmup-steps": settings.schedule_warmup, "--scheduler-total-steps": settings.steps}
    layers = [str(layer) for layer in states.layer_ids[:-1]]
    arguments = [*flags.split(), *PEER_FLAGS.split(), "--target-layer-ids", *layers]
    arguments += [text for name, value in values.items() for text in (name, str(value))]
    job = workspace / "peer.json"
    told = {
        "arguments": arguments,
        "batches": batches,
        "steps": settings.steps,
        "weights": str(workspace / "peer-weights"),
        "result": str(workspace / "peer-result.json"),
    }
    job.write_text(json.dumps(told))
    return job
