"""A capture that several engines share: parts are apart, and whoever opens the whole finds what they finished."""

from __future__ import annotations

from pathlib import Path

import torch
from synthetic_states import FACTS, make_rows, states_for

from speculators_core.states.collect import Collector, Share, content_of
from speculators_core.states.sets import StateSet

ROWS = make_rows([5, 9, 30, 4, 7, 3, 12, 8, 6])


def part(workspace: Path, share: Share = (0, 1)) -> Collector:
    return Collector(ROWS, FACTS, workspace, 16, share)


def fill(collector: Collector, positions: list[int]) -> None:
    for position in positions:
        collector.add(content_of(ROWS.row(position), states_for(ROWS.row(position))))


def test_parts_are_apart_and_together_they_are_the_whole(tmp_path: Path) -> None:
    parts = [part(tmp_path, (number, 3)) for number in range(3)]
    taken = [collector.missing() for collector in parts]
    assert sorted(position for positions in taken for position in positions) == list(range(9))
    assert all(len(positions) < 9 for positions in taken) and part(tmp_path).missing() == list(range(9))
    for collector, positions in zip(parts, taken, strict=True):
        fill(collector, positions)
        assert collector.missing() == []
    whole = part(tmp_path)
    assert whole.missing() == [] and whole.reused_shards == whole.num_shards > 3
    whole.finish({})
    captured = StateSet.open(tmp_path)
    captured.verify()
    for position in range(9):
        assert torch.equal(captured.row(position).hidden_states, states_for(ROWS.row(position)))


def test_what_a_dead_part_left_undone_the_whole_still_misses(tmp_path: Path) -> None:
    alive, dead = part(tmp_path, (0, 2)), part(tmp_path, (1, 2))
    fill(alive, alive.missing())
    lost = dead.missing()
    fill(dead, lost[:-1])  # its last shard never became whole
    again = part(tmp_path)
    assert again.missing() and set(again.missing()) <= set(lost)
    fill(again, again.missing())
    again.finish({})
    StateSet.open(tmp_path).verify()
