from __future__ import annotations

import threading
from collections import Counter

import pytest
import torch

from speculators_core.errors import DataError
from speculators_core.training.loader import PackedRows, StepLoader
from speculators_core.training.packing import num_tokens
from tests.unit.speculators_core.training.toy import MemoryStates, Row, ToyObjective, make_states

CAPACITY = 32


def packed(states: MemoryStates | None = None) -> PackedRows:
    return PackedRows(states or make_states(), ToyObjective(), "train", CAPACITY)


def loader(rows: PackedRows, accumulation: int, rank: int = 0, world_size: int = 1) -> StepLoader:
    return StepLoader(rows, accumulation=accumulation, rank=rank, world_size=world_size, prefetch=2)


@pytest.mark.parametrize(("accumulation", "world_size"), [(1, 1), (3, 1), (1, 2), (2, 3), (50, 1)])
def test_every_packed_row_reaches_one_rank_once(accumulation: int, world_size: int) -> None:
    rows = packed()
    plan = rows.epoch_plan(0, 0)
    seen: Counter[tuple[int, ...]] = Counter()
    per_rank = []
    for rank in range(world_size):
        steps = list(loader(rows, accumulation, rank, world_size).steps(plan))
        per_rank.append([len(step.batches) for step in steps])
        for step in steps:
            seen.update(step.rows)
            assert step.supervised == (True,) * len(step.rows) + (False,) * (len(step.batches) - len(step.rows))
    assert seen == Counter(plan.rows)
    assert all(counts == per_rank[0] for counts in per_rank), "ranks must run the same number of backward passes"


def test_ranks_and_accumulation_share_a_step_in_the_same_way() -> None:
    rows = packed()
    plan = rows.epoch_plan(0, 0)
    alone = list(loader(rows, 2).steps(plan))
    pair = [list(loader(rows, 1, rank, 2).steps(plan)) for rank in (0, 1)]
    for step, first, second in zip(alone, *pair, strict=True):
        assert step.rows == first.rows + second.rows
        assert torch.equal(step.denominators, first.denominators + second.denominators)


def test_starting_later_gives_the_same_steps() -> None:
    rows = packed()
    plan = rows.epoch_plan(0, 1)
    whole = list(loader(rows, 1).steps(plan))
    late = list(loader(rows, 1).steps(plan, start=3))
    assert [step.rows for step in late] == [step.rows for step in whole][3:]
    assert torch.equal(late[0].batches[0].aux_TAH, whole[3].batches[0].aux_TAH)
    assert list(loader(rows, 1).steps(plan, start=len(whole))) == []


def test_leaving_early_ends_the_thread() -> None:
    rows = packed()
    steps = loader(rows, 1).steps(rows.epoch_plan(0, 0))
    next(steps)
    assert any(thread.name == "step-loader" for thread in threading.enumerate())
    steps.close()  # type: ignore[attr-defined]
    assert not any(thread.name == "step-loader" for thread in threading.enumerate())


def test_an_error_of_the_thread_surfaces_at_its_step() -> None:
    class Torn(MemoryStates):
        def row(self, position: int) -> Row:
            if position == 7:
                raise DataError("shard 3 is torn")
            return super().row(position)

    good = make_states()
    rows = packed(Torn([good.row(i) for i in range(len(good.lengths))]))
    plan = rows.epoch_plan(0, 0)
    at = next(i for i, content in enumerate(plan.rows) if 7 in content)
    steps = loader(rows, 1).steps(plan)
    for _ in range(at):
        next(steps)
    with pytest.raises(DataError, match="torn"):
        next(steps)


def test_missing_split_is_told() -> None:
    with pytest.raises(DataError, match="no validation row"):
        PackedRows(make_states(num_validation=0), ToyObjective(), "validation", CAPACITY)


def test_blank_batch_counts_nothing() -> None:
    blank = packed().blank
    assert num_tokens(blank) == 0 and not blank.loss_mask.any()
    assert float(ToyObjective().denominators(blank)) == 0.0
