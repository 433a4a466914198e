"""Rows on their way into a set: which are missing, which shard each belongs to, and when a shard is whole.

What makes resuming exact: the division into shards is fixed before the first row is captured (`plan.json`), a shard
appears whole or not at all, and a finished one is verified and never captured again.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import torch
from pydantic import Field, ValidationError
from torch import Tensor

from speculators_core.errors import CaptureError, DataError
from speculators_core.states.sets import INDEX_NAME, SetIndex, ShardEntry, hash_row
from speculators_core.states.shards import RowContent, ShardBuffer, StatesFacts, verify_shard
from speculators_core.store import write_atomic
from speculators_core.types import StrictModel

logger = logging.getLogger(__name__)

PLAN_NAME = "plan.json"
Share = tuple[int, int]
"""(i, n): every n-th shard from the i-th on."""
WHOLE: Share = (0, 1)


class Row(Protocol):
    """A row of token ids, as a prepared data set hands it out."""

    @property
    def index(self) -> int:
        """Its number in the data set."""
        ...

    @property
    def split(self) -> Any:
        """ "train" or "validation"."""
        ...

    @property
    def input_ids(self) -> Tensor:
        """Integers [T]."""
        ...

    @property
    def loss_mask(self) -> Tensor:
        """0 or 1 [T]."""
        ...


class Rows(Protocol):
    """What a capture needs of a data set."""

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        ...

    def row(self, index: int, /) -> Row:
        """The row at that position."""
        ...


class CapturePlan(StrictModel):
    """`plan.json`: the division of these very rows into shards."""

    facts: StatesFacts = Field(description="what is captured")
    rows_digest: str = Field(description="sha256 over the rows' ids, masks and splits")
    bounds: tuple[int, ...] = Field(description="positions at which shards begin, and the number of rows")


class Collector:
    """Collects captured rows in any order and writes shards as they become whole. Not for use by several threads.

    Memory: one buffer for each shard that has some but not all rows; rows that arrive about in order keep that at two.
    """

    def __init__(
        self, rows: Rows, facts: StatesFacts, workspace: Path, shard_tokens: int, share: Share = WHOLE
    ) -> None:
        """Open or continue a workspace; only the shards of `share` count as missing.

        Raises:
            DataError: no rows, an empty row, or two rows with one index.
            StoreError: the workspace cannot be written.
        """
        self.facts = facts
        self._rows = rows
        self._workspace = workspace
        self._indices, self._lengths, digest = _scan(rows)
        self._plan = self._load_plan(digest, shard_tokens)
        bounds = self._plan.bounds
        self._shard_of = {
            self._indices[position]: number
            for number in range(len(bounds) - 1)
            for position in range(bounds[number], bounds[number + 1])
        }
        self._mine = range(share[0], len(bounds) - 1, share[1])
        self._finished = {number for number in range(len(bounds) - 1) if self._is_finished(number)}
        self._buffers: dict[int, ShardBuffer] = {}
        self.reused_shards = len(self._finished)

    @property
    def num_rows(self) -> int:
        """Rows of the whole set."""
        return len(self._indices)

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole set."""
        return sum(self._lengths)

    @property
    def num_shards(self) -> int:
        """Shards of the whole set."""
        return len(self._plan.bounds) - 1

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(self._lengths)

    def missing(self) -> list[int]:
        """Positions of the rows that must still be captured, in order."""
        bounds = self._plan.bounds
        return [
            position
            for number in self._mine
            if number not in self._finished
            for position in range(bounds[number], bounds[number + 1])
        ]

    def missing_tokens(self) -> int:
        """Tokens of those rows."""
        return sum(self._lengths[position] for position in self.missing())

    def add(self, row: RowContent) -> tuple[int, ...]:
        """Take one row; returns the indices of the rows that became durable by it (those of a shard, or none).

        Raises:
            CaptureError: a row that wasn't asked for, or of another length.
            StoreError: the disk is full.
        """
        number = self._shard_of.get(row.index)
        if number is None or number in self._finished:
            raise CaptureError(f"row {row.index} is not missing in this capture")
        begin, end = self._plan.bounds[number], self._plan.bounds[number + 1]
        buffer = self._buffers.get(number)
        if buffer is None:
            buffer = ShardBuffer(self.facts, self._indices[begin:end], self._lengths[begin:end])
            self._buffers[number] = buffer
        buffer.add(row)
        if not buffer.complete:
            return ()
        buffer.write(self._path(number))
        del self._buffers[number]
        self._finished.add(number)
        logger.info("shard %d of %d is written", number + 1, self.num_shards)
        return buffer.indices

    def finish(self, report: dict[str, Any]) -> SetIndex:
        """Write `states.json`: from now on the directory is a set.

        Raises:
            CaptureError: rows are still missing.
            StoreError: the disk is full.
        """
        if len(self._finished) < self.num_shards:
            raise CaptureError(f"{len(self.missing())} of {self.num_rows} rows have no states")
        index = self.draft_index(report)
        index.write(self._workspace)
        (self._workspace / PLAN_NAME).unlink(missing_ok=True)
        return index

    def draft_index(self, report: dict[str, Any]) -> SetIndex:
        """The index of the finished shards, not written: for gates that read the set before it counts as one."""
        bounds = self._plan.bounds
        return SetIndex(
            facts=self.facts,
            rows_digest=self._plan.rows_digest,
            shards=tuple(
                ShardEntry(
                    file=self._path(number).name,
                    rows=bounds[number + 1] - bounds[number],
                    tokens=sum(self._lengths[bounds[number] : bounds[number + 1]]),
                )
                for number in sorted(self._finished)
            ),
            report=report,
        )

    def _path(self, number: int) -> Path:
        return self._workspace / f"shard-{number:05d}.safetensors"

    def _load_plan(self, digest: str, shard_tokens: int) -> CapturePlan:
        path = self._workspace / PLAN_NAME
        earlier = self._earlier_plan()
        if earlier is not None:
            if earlier.facts == self.facts and earlier.rows_digest == digest:
                return earlier  # its bounds stand even when shard_tokens changed: finished shards stay finished
            logger.warning("%s belongs to another capture: starting anew", self._workspace)
        for leftover in (*self._workspace.glob("shard-*.safetensors"), self._workspace / INDEX_NAME):
            leftover.unlink(missing_ok=True)
        plan = CapturePlan(facts=self.facts, rows_digest=digest, bounds=plan_shards(self._lengths, shard_tokens))
        self._workspace.mkdir(parents=True, exist_ok=True)
        write_atomic(path, lambda partial: partial.write_text(plan.model_dump_json() + "\n"))
        return plan

    def _earlier_plan(self) -> CapturePlan | None:
        """The plan of a run that was cut off, or of one that finished its set but was not published."""
        try:
            return CapturePlan.model_validate_json((self._workspace / PLAN_NAME).read_bytes())
        except FileNotFoundError:
            pass
        except ValidationError:
            logger.warning("%s cannot be read: starting anew", self._workspace / PLAN_NAME)
            return None
        try:
            index = SetIndex.model_validate_json((self._workspace / INDEX_NAME).read_bytes())
        except (FileNotFoundError, ValidationError):
            return None
        bounds = (0, *accumulate(entry.rows for entry in index.shards))
        return CapturePlan(facts=index.facts, rows_digest=index.rows_digest, bounds=bounds)

    def _is_finished(self, number: int) -> bool:
        path = self._path(number)
        if not path.exists():
            return False
        try:
            verify_shard(path, self.facts)
        except CaptureError as error:
            logger.warning("%s; its rows are captured again", error.what)
            path.unlink()
            return False
        return True


def plan_shards(lengths: Sequence[int], shard_tokens: int) -> tuple[int, ...]:
    """Positions at which shards begin, then the number of rows. Only a single row may exceed `shard_tokens`."""
    bounds, tokens = [0], 0
    for position, length in enumerate(lengths):
        if tokens and tokens + length > shard_tokens:
            bounds.append(position)
            tokens = 0
        tokens += length
    return (*bounds, len(lengths))


def ids_of(row: Row) -> Tensor:
    """A row's ids as int64 [T]."""
    return torch.as_tensor(row.input_ids).to(torch.int64)


def content_of(row: Row, hidden_states: Tensor) -> RowContent:
    """A row joined with its states."""
    return RowContent(row.index, str(row.split), ids_of(row), torch.as_tensor(row.loss_mask), hidden_states)


def each(rows: Rows) -> Iterator[Row]:
    """All rows in order."""
    return (rows.row(position) for position in range(rows.num_rows))


def _scan(rows: Rows) -> tuple[tuple[int, ...], tuple[int, ...], str]:
    """Indices, lengths, and a digest of everything that a shard takes over from the rows."""
    indices, lengths, digest = [], [], hashlib.sha256()
    for row in each(rows):
        ids = ids_of(row)
        if ids.shape[0] == 0:
            raise DataError(f"row {row.index} is empty", mend="prepare the data again: every row needs tokens")
        hash_row(digest, row.index, row.split, ids, torch.as_tensor(row.loss_mask))
        indices.append(row.index)
        lengths.append(ids.shape[0])
    if not indices:
        raise DataError(
            "there are no rows to capture", mend="see the report of the data's preparation for what was dropped"
        )
    if len(set(indices)) < len(indices):
        raise DataError("two rows have the same index", mend="prepare the data again")
    return tuple(indices), tuple(lengths), digest.hexdigest()
