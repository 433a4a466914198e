"""Sets from records that were captured while the verifier wrote its replies: one pass instead of two."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hs_connectors.contract import Handle, Reader
from hs_connectors.errors import ConnectorError
from speculators_core.errors import CaptureError
from speculators_core.states.capture import CaptureReport, conclude, plan_capture
from speculators_core.states.collect import Rows, content_of, each, ids_of
from speculators_core.states.config import CaptureConfig
from speculators_core.states.gates import check_layers, check_record
from speculators_core.states.parity import ParityGate
from speculators_core.states.source import Tally
from speculators_core.types import ProgressCallback
from speculators_core.verifier.facts import read_facts


def match_handles(rows: Rows, conversations: Iterable[Mapping[str, Any]]) -> dict[int, Handle]:
    """Find the record of each row among regenerated conversations, by token ids.

    Args:
        rows: prepared from those conversations.
        conversations: lines of `regenerate`: `turns` with prompt_token_ids, token_ids and kv_transfer_params.

    Returns:
        row index -> handle of the turn that the row ends with; rows that were cut or have no record are left out.
    """
    wanted = {tuple(ids_of(row).tolist()): row.index for row in each(rows)}
    found: dict[int, Handle] = {}
    for conversation in conversations:
        for turn in conversation.get("turns", ()):
            index = wanted.get((*turn["prompt_token_ids"], *turn["token_ids"]))
            parameters = turn.get("kv_transfer_params") or {}
            if index is not None and "handle" in parameters:
                found[index] = Handle.from_json(parameters["handle"])
    return found


def read_regenerated(path: Path) -> Iterable[dict[str, Any]]:
    """Lines of a file that `regenerate` wrote."""
    with path.open(encoding="utf-8") as stream:
        for line in stream:
            yield json.loads(line)


def store_handles(
    rows: Rows,
    handles: Mapping[int, Handle],
    reader: Reader,
    layer_ids: Sequence[int],
    fingerprint: str,
    config: CaptureConfig,
    workspace: Path,
    *,
    verifier_dir: Path,
    progress: ProgressCallback | None = None,
) -> CaptureReport:
    """Turn records that were captured while replies were generated into a set.

    Args:
        rows: prompt and reply of each row. The last token was never an input: the set's rows are one token shorter.
        handles: row index -> address of its record. Records are deleted when their shard is on disk, so that a killed
            run can be repeated.

    Raises:
        as `capture`; CaptureError also for a row without a handle.
    """
    facts = read_facts(verifier_dir)
    layers = check_layers(layer_ids, facts.num_hidden_layers)
    inputs = WithoutLastToken(rows)
    collector = plan_capture(inputs, facts, layers, fingerprint, config, workspace)
    gate = ParityGate(inputs, collector, config, verifier_dir, facts, False)
    gate.prepare()
    tally = Tally()
    started = time.monotonic()
    missing = collector.missing()
    for done, position in enumerate(missing):
        row = inputs.row(position)
        handle = handles.get(row.index)
        if handle is None:
            raise CaptureError(
                f"row {row.index} has no captured record", mend="regenerate it, or capture the rows anew"
            )
        try:
            record = reader.get(handle, config.record_timeout_s)
        except ConnectorError as error:
            raise CaptureError(
                f"the record of row {row.index} cannot be read: {error.what}",
                mend=error.mend or "capture the rows anew",
            ) from error
        ids = ids_of(row)
        # A row that was cut at the longest length is the beginning of its record.
        record = replace(record, token_ids=record.token_ids[: len(ids)], hidden_states=record.hidden_states[: len(ids)])
        check_record(record, row.index, ids, collector.facts)
        durable = collector.add(content_of(row, record.hidden_states))
        tally.add(record)
        for index in durable:
            reader.delete(handles[index])
        if progress is not None:
            progress(done + 1, len(missing))
    tally.seconds = time.monotonic() - started
    return conclude(collector, gate, workspace, tally)


class WithoutLastToken:
    """Rows without their last token: what of a generated reply was an input of the verifier."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self._rows.num_rows

    def row(self, index: int, /) -> _CutRow:
        """The row at that position, one token shorter."""
        row = self._rows.row(index)
        return _CutRow(row.index, str(row.split), ids_of(row)[:-1], torch.as_tensor(row.loss_mask)[:-1])


class _CutRow:
    def __init__(self, index: int, split: str, input_ids: Tensor, loss_mask: Tensor) -> None:
        self.index, self.split, self.input_ids, self.loss_mask = index, split, input_ids, loss_mask
