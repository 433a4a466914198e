"""One shard of a hidden-state set: whole rows, token-contiguous, in one safetensors file.

Tensors (t tokens, r rows, K layers, H hidden size):
    hidden_states [t, K, H] captured dtype · input_ids int64 [t] · loss_mask uint8 [t]
    offsets int64 [r + 1] · row_index int64 [r] · split uint8 [r] (0 train, 1 validation)
Metadata: one entry, named after the schema: layer ids, dtype, verifier, source, and a CRC32 of each tensor's bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from speculators_core.errors import CaptureError
from speculators_core.store import write_atomic
from speculators_core.types import StrictModel

SCHEMA = "draftsmith.states/1"
SPLITS = ("train", "validation")


class StatesFacts(StrictModel):
    """What every shard of a set agrees on."""

    layer_ids: tuple[int, ...] = Field(
        description="captured layers, ascending; the last: after the last layer, pre-norm"
    )
    hidden_size: int = Field(ge=1, description="H")
    dtype: str = Field(description="torch name of the states' dtype")
    verifier_fingerprint: str = Field(description="digest of the verifier that the states come from")
    source: str = Field(description="engine, hf or peer")

    @property
    def bytes_per_token(self) -> int:
        """K · H · bytes of the dtype, with the token's id and mask."""
        itemsize: int = getattr(torch, self.dtype).itemsize
        return len(self.layer_ids) * self.hidden_size * itemsize + 9


class ShardHeader(StrictModel):
    """A shard's metadata."""

    facts: StatesFacts = Field(description="what the states are")
    crc32: dict[str, str] = Field(description="CRC32 (8 hex digits) of each tensor's bytes")


@dataclass(frozen=True)
class RowContent:
    """One row on its way into a shard.

    index: its number in the data set · split: name · input_ids int64 [T] · loss_mask [T] · hidden_states [T, K, H].
    """

    index: int
    split: str
    input_ids: Tensor
    loss_mask: Tensor
    hidden_states: Tensor


class ShardBuffer:
    """Rows of one shard, in the order of their dataset indices, whatever order they arrive in.

    The states are copied into one buffer as they come: memory is one shard, and records can be dropped at once.
    """

    def __init__(self, facts: StatesFacts, indices: tuple[int, ...], lengths: tuple[int, ...]) -> None:
        self.facts = facts
        self.indices = indices
        self._lengths = lengths
        self._place = {index: place for place, index in enumerate(indices)}
        self._offsets = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
        tokens = int(self._offsets[-1])
        shape = (tokens, len(facts.layer_ids), facts.hidden_size)
        self._states = torch.empty(shape, dtype=getattr(torch, facts.dtype))
        self._ids = torch.empty(tokens, dtype=torch.int64)
        self._mask = torch.empty(tokens, dtype=torch.uint8)
        self._split = torch.zeros(len(indices), dtype=torch.uint8)
        self._missing = set(indices)

    @property
    def complete(self) -> bool:
        """Whether every row is there."""
        return not self._missing

    def add(self, row: RowContent) -> None:
        """Copy one row in.

        Raises:
            CaptureError: its length isn't the planned one.
        """
        place = self._place[row.index]
        if row.input_ids.shape[0] != self._lengths[place]:
            raise CaptureError(
                f"row {row.index} has {row.input_ids.shape[0]} tokens where {self._lengths[place]} were planned"
            )
        begin, end = int(self._offsets[place]), int(self._offsets[place + 1])
        self._states[begin:end] = row.hidden_states
        self._ids[begin:end] = row.input_ids
        self._mask[begin:end] = row.loss_mask.to(torch.uint8)
        self._split[place] = SPLITS.index(row.split)
        self._missing.discard(row.index)

    def write(self, path: Path) -> None:
        """Write the shard atomically.

        Raises:
            StoreError: the disk is full or not writable; nothing is left behind.
        """
        assert self.complete
        tensors = {
            "hidden_states": self._states,
            "input_ids": self._ids,
            "loss_mask": self._mask,
            "offsets": self._offsets,
            "row_index": torch.tensor(self.indices, dtype=torch.int64),
            "split": self._split,
        }
        header = ShardHeader(facts=self.facts, crc32={name: checksum(tensor) for name, tensor in tensors.items()})
        # One entry: safetensors writes several in an order that changes, and equal states shall give equal files.
        metadata = {SCHEMA: header.model_dump_json()}
        write_atomic(path, lambda partial: save_file(tensors, partial, metadata))


def checksum(tensor: Tensor) -> str:
    """CRC32 (8 hex digits) of a tensor's bytes."""
    return f"{zlib.crc32(tensor.contiguous().flatten().view(torch.uint8).numpy().data):08x}"


def read_header(path: Path) -> ShardHeader:
    """A shard's metadata.

    Raises:
        CaptureError: not a whole safetensors file, or not a shard of a known schema.
    """
    try:
        with safe_open(path, framework="pt") as shard:
            metadata: Mapping[str, str] = shard.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise damaged(path, str(error)) from error
    if SCHEMA not in metadata:
        raise CaptureError(
            f"{path} is no shard of schema {SCHEMA}; its metadata: {sorted(metadata)}",
            mend="capture the states again with this version, or import the peer's layout with `import_peer`",
        )
    try:
        return ShardHeader.model_validate_json(metadata[SCHEMA])
    except ValidationError as error:
        raise damaged(path, error.errors()[0]["msg"]) from error


def verify_shard(path: Path, facts: StatesFacts) -> None:
    """Check that a shard is whole, unchanged since it was written, and belongs to the set.

    Raises:
        CaptureError: unreadable, of other layers, dtype or verifier, a flipped bit, or inconsistent sizes.
    """
    header = read_header(path)
    for key, value in facts.model_dump().items():
        if getattr(header.facts, key) != value:
            raise damaged(path, f"its {key} is {getattr(header.facts, key)} where the set has {value}")
    with safe_open(path, framework="pt") as shard:
        if set(shard.keys()) != set(header.crc32):
            raise damaged(path, "tensors are missing or without a checksum")
        for name, value in header.crc32.items():
            if checksum(shard.get_tensor(name)) != value:
                raise damaged(path, f"the checksum of {name} differs")
        tokens, layers, hidden = shard.get_slice("hidden_states").get_shape()
        offsets = shard.get_tensor("offsets")
        if (layers, hidden, int(offsets[-1])) != (len(facts.layer_ids), facts.hidden_size, tokens):
            raise damaged(path, f"hidden states of shape {[tokens, layers, hidden]} don't fit the set")


def damaged(path: Path, why: str) -> CaptureError:
    """The error for a shard that cannot be trusted."""
    return CaptureError(
        f"shard {path} is damaged: {why}",
        mend="delete that file and run the capture again: only its rows are captured anew",
    )
