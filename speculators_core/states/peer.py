"""The peer's offline layout, read and written: a data set in Arrow beside one file of states a row.

    <directory>/*.arrow, dataset_info.json, state.json     columns input_ids, loss_mask, seq_len
    <directory>/hidden_states/hs_<row>.safetensors         hidden_states [T, K, H], token_ids int64 [T]
<row> is the row's position in the data set. Nothing in it says which layers or which verifier: whoever imports must.
Files of its fp8 connector hold `hidden_states_scales` float32 [T, 1, 1] beside float8 states (decision 36).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from speculators_core.errors import CaptureError, DataError
from speculators_core.states.collect import Collector, content_of, ids_of
from speculators_core.states.gates import check_states
from speculators_core.states.sets import SetIndex, StateSet
from speculators_core.states.shards import StatesFacts
from speculators_core.store import storage_errors, write_atomic

STATES_FOLDER = "hidden_states"


@dataclass(frozen=True)
class _PeerRow:
    index: int
    split: str
    input_ids: Tensor
    loss_mask: Tensor


def export_peer(states: StateSet, directory: Path, *, split: str | None = None) -> int:
    """Write a set in the peer's layout; rows are renumbered from 0 in the set's order.

    Args:
        split: "train" or "validation"; None: all rows.

    Returns:
        The number of rows written.

    Raises:
        DataError: the set has no row of that split.
        StoreError: the disk is full or not writable.
    """
    positions = [place for place, name in enumerate(states.splits) if split is None or name == split]
    if not positions:
        raise DataError(f"the set has no {split} rows to export")
    folder = directory / STATES_FOLDER
    with storage_errors(directory, "exporting hidden states"):
        folder.mkdir(parents=True, exist_ok=True)
    for number, position in enumerate(positions):
        row = states.row(position)
        tensors = {"hidden_states": row.hidden_states.contiguous(), "token_ids": row.input_ids.contiguous()}
        write_atomic(folder / f"hs_{number}.safetensors", partial(save_file, tensors))
    with storage_errors(directory, "exporting a data set"):
        _save_dataset(directory, _columns(states, positions))
    return len(positions)


def import_peer(
    directory: Path,
    workspace: Path,
    layer_ids: Sequence[int],
    fingerprint: str,
    *,
    validation_rows: Sequence[int] = (),
    shard_tokens: int = 16384,
) -> SetIndex:
    """Turn the peer's layout into a set in `workspace`; goes on after its last finished shard.

    Args:
        layer_ids: what the files hold, ascending; they don't say it themselves.
        fingerprint: digest of the verifier that the states come from, likewise.
        validation_rows: rows that become the validation split; the others are for training.

    Raises:
        DataError: no data set there.
        CaptureError: a row's file is missing, unreadable, of other tokens or shape, not finite or constant.
    """
    rows = PeerRows(directory, frozenset(validation_rows))
    first = read_peer_states(directory, 0)
    if first.dim() != 3 or first.shape[1] != len(layer_ids):
        raise CaptureError(
            f"{directory} holds states of shape {list(first.shape)}, and {len(layer_ids)} layers were named",
            mend="name the layers that were captured, ascending, the last one included",
        )
    facts = StatesFacts(
        layer_ids=tuple(layer_ids),
        hidden_size=first.shape[2],
        dtype=str(first.dtype).removeprefix("torch."),
        verifier_fingerprint=fingerprint,
        source="peer",
    )
    collector = Collector(rows, facts, workspace, shard_tokens)
    for position in collector.missing():
        row = rows.row(position)
        ids = ids_of(row)
        states = read_peer_states(directory, position, ids)
        if states.dtype != first.dtype or tuple(states.shape[1:]) != tuple(first.shape[1:]):
            raise CaptureError(f"row {position} of {directory} has other states than row 0: {list(states.shape)}")
        check_states(states, f"row {position} of {directory}", layer_ids, varied=bool((ids != ids[0]).any()))
        collector.add(content_of(row, states))
    return collector.finish({})


class PeerRows:
    """The data set of the peer's layout as token rows."""

    def __init__(self, directory: Path, validation_rows: frozenset[int]) -> None:
        from datasets import Dataset, load_from_disk

        try:
            data = load_from_disk(str(directory))
        except (FileNotFoundError, ValueError) as error:
            raise DataError(f"{directory} holds no data set in Arrow: {error}") from error
        if not isinstance(data, Dataset) or not {"input_ids", "loss_mask"} <= set(data.column_names):
            raise DataError(f"{directory} lacks the columns input_ids and loss_mask")
        self._data = data.with_format(None)
        self._validation_rows = validation_rows

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self._data)

    def row(self, index: int, /) -> _PeerRow:
        """The row at that position."""
        row: dict[str, Any] = self._data[index]
        split = "validation" if index in self._validation_rows else "train"
        return _PeerRow(index, split, torch.tensor(row["input_ids"]), torch.tensor(row["loss_mask"]))


def read_peer_states(directory: Path, row: int, input_ids: Tensor | None = None) -> Tensor:
    """States [T, K, H] of one row; fp8 ones come back as bfloat16. With `input_ids`, the file's tokens are compared.

    Raises:
        CaptureError: missing, unreadable, or of other tokens.
    """
    path = directory / STATES_FOLDER / f"hs_{row}.safetensors"
    try:
        tensors = load_file(path)
        states: Tensor = tensors["hidden_states"]
        tokens: Tensor = tensors["token_ids"]
    except (OSError, SafetensorError, KeyError) as error:
        raise CaptureError(f"{path} cannot be read: {error}", mend="capture that row again") from error
    if input_ids is not None and not torch.equal(tokens.to(torch.int64), input_ids):
        raise CaptureError(f"{path} holds other tokens than row {row} of the data set")
    scales = tensors.get("hidden_states_scales")
    if scales is not None:
        states = (states.float() * scales).to(torch.bfloat16)
    if states.shape[0] != tokens.shape[0]:
        raise CaptureError(f"{path} has {states.shape[0]} states for {tokens.shape[0]} tokens")
    return states


def token_frequencies(states: StateSet, vocab_size: int) -> Tensor:
    """How often each token is supervised: int64 [V], what a reduced draft vocabulary is chosen by."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for row in states.rows():
        counts += torch.bincount(row.input_ids[row.loss_mask], minlength=vocab_size)
    return counts


def _columns(states: StateSet, positions: Sequence[int]) -> Iterator[dict[str, Any]]:
    for position in positions:
        row = states.row(position)
        ids = row.input_ids.tolist()
        yield {"input_ids": ids, "loss_mask": row.loss_mask.to(torch.int64).tolist(), "seq_len": len(ids)}


def _save_dataset(directory: Path, rows: Iterator[dict[str, Any]]) -> None:
    from datasets import Dataset, Features, List, Value

    features = Features(
        {"input_ids": List(Value("int64")), "loss_mask": List(Value("int64")), "seq_len": Value("int64")}
    )
    columns: dict[str, list[Any]] = {name: [] for name in features}
    for row in rows:
        for name, value in row.items():
            columns[name].append(value)
    # The format is stored with the data: the peer's reader relies on tensors coming back.
    Dataset.from_dict(columns, features=features).with_format("torch").save_to_disk(str(directory))
