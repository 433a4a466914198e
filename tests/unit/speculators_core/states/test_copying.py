"""A copy of a set is that set: what an earlier copy of another one left never gets in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from synthetic_states import FACTS, ListOfRows, make_rows, states_for

from speculators_core.errors import CaptureError
from speculators_core.states.collect import Collector, content_of
from speculators_core.states.copying import copy_set
from speculators_core.states.sets import StateSet

LENGTHS = [5, 9, 30, 4, 7]


def captured(directory: Path, rows: ListOfRows, scale: float = 1.0) -> StateSet:
    directory.mkdir()
    collector = Collector(rows, FACTS, directory, shard_tokens=20)
    for row in rows.content:
        collector.add(content_of(row, states_for(row) * scale))
    collector.finish({})
    return StateSet.open(directory)


def cut_off(states: StateSet, target: Path, shards: int) -> None:
    """What a copy leaves that was killed after so many shards, within the next one."""
    copy_set(states, target)
    (target / "states.json").unlink()
    for entry in states.shards[shards:]:
        (target / entry.file).unlink()
    (target / states.shards[shards].file).write_bytes(b"half")


def test_a_copy_that_was_cut_off_goes_on(tmp_path: Path) -> None:
    states = captured(tmp_path / "a", make_rows(LENGTHS))
    cut_off(states, tmp_path / "copy", 1)
    whole = tmp_path / "copy" / states.shards[0].file
    before = whole.stat().st_mtime_ns
    copied = copy_set(states, tmp_path / "copy")
    copied.verify()
    assert whole.stat().st_mtime_ns == before
    for file in (*(entry.file for entry in states.shards), "states.json"):
        assert (tmp_path / "copy" / file).read_bytes() == (tmp_path / "a" / file).read_bytes()


@pytest.mark.parametrize("lengths", [LENGTHS, LENGTHS[:2], [6, 8, 31, 3, 9]], ids=["equal", "fewer", "other"])
def test_shards_of_another_set_are_refused(tmp_path: Path, lengths: list[int]) -> None:
    """Equal verifier, layers, rows and tokens of each shard: what the facts and the index say is equal, too."""
    cut_off(captured(tmp_path / "a", make_rows(LENGTHS)), tmp_path / "copy", 2)
    before = {path.name: path.read_bytes() for path in (tmp_path / "copy").iterdir()}
    other = captured(tmp_path / "b", make_rows(lengths), scale=2.0)
    with pytest.raises(CaptureError, match=r"holds a shard of another set: shard-0000[01][\s\S]*mend: name a new"):
        copy_set(other, tmp_path / "copy")
    assert {path.name: path.read_bytes() for path in (tmp_path / "copy").iterdir()} == before, "nothing was touched"


def test_a_set_of_whole_shards_of_two_captures_is_none(tmp_path: Path) -> None:
    one = captured(tmp_path / "a", make_rows(LENGTHS))
    other = make_rows(LENGTHS)
    torch.bitwise_not(other.content[0].loss_mask, out=other.content[0].loss_mask)
    other.content[0].loss_mask.bitwise_and_(1)
    mixed = captured(tmp_path / "b", other)
    file = one.shards[0].file
    (tmp_path / "b" / file).write_bytes((tmp_path / "a" / file).read_bytes())
    one.verify()
    with pytest.raises(CaptureError, match="other rows than its"):
        StateSet.open(mixed.directory).verify()
