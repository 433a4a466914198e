"""Rows whose states are kept on the trainer's disk, so that they are asked of an engine once.

Which rows is decided before the first one arrives: the held-out ones, and the first training rows that fit the quota.
An epoch reads every row once, so whatever is kept, an epoch is spared exactly the kept rows' requests: there is nothing
to gain by replacing one, and no bookkeeping that a kill could tear or ranks disagree on.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from hs_connectors.contract import Handle, Record
from hs_connectors.errors import ConnectorError, RecordTimeout
from hs_connectors.registry import open_reader, open_writer
from speculators_core.errors import CaptureError, StoreError
from speculators_core.states.collect import Row, ids_of
from speculators_core.states.gates import check_record
from speculators_core.states.shards import StatesFacts

log = logging.getLogger(__name__)

RESERVE_BYTES = 2 << 30
"""What keeping leaves free: checkpoints, metrics and logs go to the same disk."""


class KeptRows:
    """Records in a directory, one a row; read back only where checksum, tokens, layers and verifier are right."""

    def __init__(
        self, directory: Path, facts: StatesFacts, lengths: Sequence[int], splits: Sequence[str], quota_bytes: float
    ) -> None:
        """Raises StoreError where the directory cannot be written."""
        self._facts = facts
        self.positions = choose_kept(lengths, splits, facts.bytes_per_token, quota_bytes)
        config = {"root": str(directory), "fsync": False}  # what a power cut tears, its checksum betrays
        try:
            self._writer, self._reader = open_writer("file", config), open_reader("file", config)
        except ConnectorError as error:
            raise StoreError(f"rows cannot be kept: {error.what}", mend=error.mend) from error
        self._directory, self._full = directory, False

    def get(self, position: int, row: Row) -> Tensor | None:
        """The states [T, K, H] of a kept row; None where it is not there, or is damaged or another's."""
        if position not in self.positions:
            return None
        handle = _handle(position)
        try:
            record = self._reader.get(handle, 0)
            check_record(record, row.index, ids_of(row), self._facts)
        except RecordTimeout:
            return None
        except (ConnectorError, CaptureError) as error:
            log.warning("a kept row is asked for again: %s", error.what)
            self._reader.delete(handle)
            return None
        return record.hidden_states

    def put(self, position: int, row: Row, states: Tensor) -> None:
        """Keep a row, if it is one of those. A disk that is about to be full ends the keeping, not the training."""
        if position not in self.positions or self._full:
            return
        if shutil.disk_usage(self._directory).free < RESERVE_BYTES + states.nbytes:
            self._full = True
            log.warning("no more rows are kept: %s has no more than the rest needs", self._directory)
            return
        facts = self._facts
        record = Record(states, ids_of(row), facts.layer_ids, facts.dtype, facts.verifier_fingerprint)
        try:
            self._writer.put(_handle(position).key, record)
        except ConnectorError as error:
            self._full = True
            log.warning("no more rows are kept: %s", error.what)


def bytes_to_keep(
    directory: Path, lengths: Sequence[int], splits: Sequence[str], bytes_per_token: int, quota_bytes: float
) -> int:
    """Bytes that keeping those rows will still write, beside what the directory holds already."""
    kept = choose_kept(lengths, splits, bytes_per_token, quota_bytes)
    there = sum(path.stat().st_size for path in directory.glob("*"))
    return max(0, sum(lengths[position] for position in kept) * bytes_per_token - there)


def choose_kept(
    lengths: Sequence[int], splits: Sequence[str], bytes_per_token: int, quota_bytes: float
) -> frozenset[int]:
    """Positions of the held-out rows, which every validation reads, and of the first others within the quota."""
    kept, left = set(), quota_bytes
    for position, (length, split) in enumerate(zip(lengths, splits, strict=True)):
        if split != "train":
            kept.add(position)
        elif (size := length * bytes_per_token) <= left:
            kept.add(position)
            left -= size
    return frozenset(kept)


def _handle(position: int) -> Handle:
    return Handle("file", f"row-{position}")
