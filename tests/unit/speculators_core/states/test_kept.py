"""Rows that are kept leave room on the disk for what training cannot do without."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from synthetic_states import FACTS, make_rows, states_for

from speculators_core.states import kept
from speculators_core.states.kept import RESERVE_BYTES, KeptRows, bytes_to_keep

LENGTHS = [5, 9, 30]
ROWS = make_rows(LENGTHS)


def test_keeping_ends_before_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = KeptRows(tmp_path, FACTS, LENGTHS, ["validation"] * 3, 0)
    free = RESERVE_BYTES + states_for(ROWS.row(0)).nbytes
    monkeypatch.setattr(kept, "shutil", SimpleNamespace(disk_usage=lambda _: SimpleNamespace(free=free)))
    with caplog.at_level(logging.WARNING):
        for position in range(3):
            found.put(position, ROWS.row(position), states_for(ROWS.row(position)))
    assert caplog.text.count("no more rows are kept") == 1
    again = KeptRows(tmp_path, FACTS, LENGTHS, ["validation"] * 3, 0)
    states = [again.get(position, ROWS.row(position)) for position in range(3)]
    assert states[0] is not None and torch.equal(states[0], states_for(ROWS.row(0)))
    assert states[1:] == [None, None]


def test_what_lies_there_already_is_not_needed_again(tmp_path: Path) -> None:
    per_token = FACTS.bytes_per_token
    assert bytes_to_keep(tmp_path / "none", LENGTHS, ["train", "validation", "train"], per_token, 6 * per_token) == (
        14 * per_token
    )
    (tmp_path / "row-0.safetensors").write_bytes(b"x" * 100)
    assert bytes_to_keep(tmp_path, LENGTHS, ["train"] * 3, per_token, 6 * per_token) == 5 * per_token - 100
