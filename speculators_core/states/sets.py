"""A hidden-state set on disk: shards and `states.json`, read through memory maps."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from speculators_core.errors import CaptureError
from speculators_core.states.shards import SPLITS, StatesFacts, damaged, verify_shard
from speculators_core.store import write_atomic
from speculators_core.types import StrictModel

INDEX_NAME = "states.json"
_OPEN_SHARDS = 16


class ShardEntry(StrictModel):
    """One shard of a set."""

    file: str = Field(pattern=r"^shard-[0-9]{5,}\.safetensors$", description="file name in the set's directory")
    rows: int = Field(ge=1, description="rows in it")
    tokens: int = Field(ge=1, description="tokens in it")


class SetIndex(StrictModel):
    """`states.json`, written when every shard is there."""

    facts: StatesFacts = Field(description="what all shards agree on")
    rows_digest: str = Field(description="sha256 over the rows' ids, masks and splits: which rows these are")
    shards: tuple[ShardEntry, ...] = Field(description="shards in the order of their rows")
    report: dict[str, Any] = Field(default_factory=dict, description="how the set was made: parity, retries, engine")

    def write(self, directory: Path) -> None:
        """Write it atomically. StoreError when the disk is full."""
        text = self.model_dump_json(indent=1) + "\n"
        write_atomic(directory / INDEX_NAME, lambda partial: partial.write_text(text))


def hash_row(digest: hashlib._Hash, index: int, split: str, input_ids: Tensor, loss_mask: Tensor) -> None:
    """Add everything that a shard takes over from a row (ids int64 [T], mask [T]) to what becomes `rows_digest`."""
    digest.update(f"{index} {split} {input_ids.shape[0]}\n".encode())
    digest.update(input_ids.contiguous().numpy().data)
    digest.update(loss_mask.to(torch.uint8).contiguous().numpy().data)


@dataclass(frozen=True)
class StateRow:
    """One captured sequence of T tokens.

    index: the row of the dataset · split: "train" or "validation" · input_ids int64 [T] · loss_mask bool [T] (True: a
    token that the verifier wrote) · hidden_states [T, K, H] in the captured dtype, layers ascending, the last one
    before the verifier's final norm; a view of mapped memory: read only.
    """

    index: int
    split: str
    input_ids: Tensor
    loss_mask: Tensor
    hidden_states: Tensor


class StateSet:
    """Rows of a captured set by position 0 … num_rows − 1, in the order of the dataset.

    Memory: the small tensors of all shards (ids' offsets, row indices, splits) are resident; hidden states are mapped,
    at most 16 shards at once, and their pages belong to the kernel. Several
    threads may read. Picklable: it opens itself again.
    """

    def __init__(self, directory: Path, index: SetIndex) -> None:
        self._directory = directory
        self._index = index
        self._open: OrderedDict[int, Any] = OrderedDict()
        self._starts: list[int] = []
        self._where: list[tuple[int, int]] = []
        rows, splits, lengths, offsets = [], [], [], []
        for number, entry in enumerate(index.shards):
            small = self._small_tensors(number, entry)
            rows.append(small["row_index"])
            splits.append(small["split"])
            offsets.append(small["offsets"])
            lengths.append(small["offsets"].diff())
            self._where.extend((number, place) for place in range(entry.rows))
        self._row_index = torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64)
        self._split = torch.cat(splits) if splits else torch.empty(0, dtype=torch.uint8)
        self._lengths = torch.cat(lengths) if lengths else torch.empty(0, dtype=torch.int64)
        self._offsets = offsets

    @classmethod
    def open(cls, path: Path | str) -> StateSet:
        """Open a finished set.

        Raises:
            CaptureError: no finished set there, or a shard is missing or doesn't fit the index. Bits are checked by
                `verify`, or by the store that handed out the directory.
        """
        directory = Path(path)
        try:
            index = SetIndex.model_validate_json((directory / INDEX_NAME).read_bytes())
        except FileNotFoundError as error:
            raise CaptureError(
                f"{directory} holds no finished hidden-state set: {INDEX_NAME} is missing",
                mend="run the capture again: it goes on after the last finished shard",
            ) from error
        except ValidationError as error:
            raise CaptureError(f"{directory / INDEX_NAME} cannot be read: {error.errors()[0]['msg']}") from error
        return cls(directory, index)

    @property
    def directory(self) -> Path:
        """Where it lies."""
        return self._directory

    @property
    def index(self) -> SetIndex:
        """What `states.json` says."""
        return self._index

    @property
    def shards(self) -> tuple[ShardEntry, ...]:
        """Its shards, in the order of their rows."""
        return self._index.shards

    @property
    def facts(self) -> StatesFacts:
        """Layers, sizes, dtype, verifier and source of the set."""
        return self._index.facts

    @property
    def report(self) -> dict[str, Any]:
        """How the set was made."""
        return self._index.report

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Captured layers, ascending; the last is the number of layers: after the last one, before the norm."""
        return self.facts.layer_ids

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.facts.hidden_size

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the states."""
        dtype: torch.dtype = getattr(torch, self.facts.dtype)
        return dtype

    @property
    def num_rows(self) -> int:
        """Rows of both splits."""
        return len(self._where)

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return sum(entry.tokens for entry in self._index.shards)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row, by position; touches no shard."""
        lengths: list[int] = self._lengths.tolist()
        return lengths

    @property
    def splits(self) -> list[str]:
        """Split of each row, by position; touches no shard."""
        return [SPLITS[number] for number in self._split.tolist()]

    @property
    def row_indices(self) -> list[int]:
        """Dataset index of each row, by position; touches no shard."""
        indices: list[int] = self._row_index.tolist()
        return indices

    def row(self, position: int) -> StateRow:
        """The row at a position (not a dataset index).

        Raises:
            CaptureError: its shard vanished.
        """
        number, place = self._where[position]
        shard = self._shard(number)
        begin, end = int(self._offsets[number][place]), int(self._offsets[number][place + 1])
        return StateRow(
            index=int(self._row_index[position]),
            split=SPLITS[int(self._split[position])],
            input_ids=shard.get_slice("input_ids")[begin:end],
            loss_mask=shard.get_slice("loss_mask")[begin:end].bool(),
            hidden_states=shard.get_slice("hidden_states")[begin:end],
        )

    def expecting(self, positions: Iterable[int]) -> AbstractContextManager[None]:
        """Nothing: the kernel reads mapped files ahead by itself."""
        return nullcontext()

    def rows(self) -> Iterator[StateRow]:
        """All rows in order."""
        return (self.row(position) for position in range(self.num_rows))

    def verify(self) -> None:
        """Read every byte and check it, and that these are the index's rows. CaptureError names the damaged shard."""
        for entry in self._index.shards:
            verify_shard(self._directory / entry.file, self.facts)
        digest = hashlib.sha256()
        for row in self.rows():
            hash_row(digest, row.index, row.split, row.input_ids, row.loss_mask)
        if digest.hexdigest() != self._index.rows_digest:
            raise CaptureError(
                f"{self._directory} holds other rows than its {INDEX_NAME} says: whole shards of several sets",
                mend="delete it, and copy or capture the set again",
            )

    def __reduce__(self) -> tuple[object, ...]:
        """Pickled as its directory."""
        return StateSet.open, (self._directory,)

    def _small_tensors(self, number: int, entry: ShardEntry) -> dict[str, Tensor]:
        shard = self._shard(number)
        path = self._directory / entry.file
        try:
            small = {name: shard.get_tensor(name).clone() for name in ("offsets", "row_index", "split")}
            shape = shard.get_slice("hidden_states").get_shape()
        except SafetensorError as error:
            raise damaged(path, str(error)) from error
        if shape != [entry.tokens, len(self.layer_ids), self.hidden_size]:
            raise damaged(path, f"hidden states of shape {shape} don't fit the set's index")
        if small["row_index"].shape[0] != entry.rows or int(small["offsets"][-1]) != entry.tokens:
            raise damaged(path, "its rows don't fit the set's index")
        return small

    def _shard(self, number: int) -> Any:
        shard = self._open.get(number)
        if shard is None:
            path = self._directory / self._index.shards[number].file
            try:
                shard = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise damaged(path, str(error)) from error
            self._open[number] = shard
            while len(self._open) > _OPEN_SHARDS:
                self._open.popitem(last=False)
        return shard
