from __future__ import annotations

from collections import Counter

import pytest
import torch

from speculators_core.training.loader import PackedRows
from speculators_core.training.packing import num_tokens, plan_epoch, plan_in_order
from tests.unit.speculators_core.training.toy import MemoryStates, ToyDraft, ToyObjective, make_states

LENGTHS = [int(n) for n in torch.randint(1, 130, (3000,), generator=torch.Generator().manual_seed(1))]


@pytest.mark.parametrize("epoch", [0, 1, 7])
def test_each_row_is_in_exactly_one_packed_row_and_none_overflows(epoch: int) -> None:
    plan = plan_epoch(LENGTHS, 100, seed=3, epoch=epoch)
    assert Counter(row for packed in plan.rows for row in packed) == Counter(range(len(LENGTHS)))
    assert max(sum(min(LENGTHS[row], 100) for row in packed) for packed in plan.rows) <= 100
    assert plan.clipped == sum(length > 100 for length in LENGTHS)
    assert plan.tokens == sum(min(length, 100) for length in LENGTHS)
    assert plan.fill(100) > 0.93


def test_plan_depends_on_seed_and_epoch_alone() -> None:
    assert plan_epoch(LENGTHS, 100, seed=3, epoch=2) == plan_epoch(list(LENGTHS), 100, seed=3, epoch=2)
    plans = {plan_epoch(LENGTHS, 100, seed=seed, epoch=epoch).rows for seed in (3, 4) for epoch in (0, 1, 2)}
    assert len(plans) == 6
    assert plan_in_order(LENGTHS, 100) == plan_in_order(LENGTHS, 100)


def test_plan_is_the_same_on_every_machine() -> None:
    """A stored run resumes elsewhere: the order is part of the format."""
    assert plan_epoch([5, 3, 4, 6, 2, 9], 10, seed=0, epoch=0).rows == ((5,), (3, 2), (0, 1, 4))


def test_packed_equals_unpacked() -> None:
    """Loss and gradient summed over documents one by one equal those of packed rows."""
    states, objective = make_states(longest=14), ToyObjective()
    grads = []
    for capacity in (14, 47):
        rows = PackedRows(states, objective, "train", capacity)
        plan = rows.epoch_plan(0, 0)
        packed = [(i,) for i in range(len(rows.positions))] if capacity == 14 else plan.rows
        batches = [rows.batch(content) for content in packed]
        total = torch.stack([objective.denominators(batch) for batch in batches]).sum(0)
        model = ToyDraft(noise=0.0)
        for batch in batches:
            objective.step(model, batch, total).loss.backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad]))
        if capacity == 47:
            assert len(batches) < len(rows.positions) / 2
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-5, atol=1e-7)


def test_clipped_row_fills_its_packed_row_and_keeps_its_beginning() -> None:
    states = make_states(longest=20)
    long = max(range(24), key=lambda i: states.lengths[i])
    rows = PackedRows(MemoryStates([states.row(long)]), ToyObjective(), "train", 10)
    batch = rows.batch((0,))
    assert num_tokens(batch) == 10
    assert torch.equal(batch.input_ids, states.row(long).input_ids[1:11])
    assert rows.epoch_plan(0, 0).clipped == 1


def test_padding_is_marked_and_empty() -> None:
    rows = PackedRows(make_states(), ToyObjective(), "train", 64)
    batch = rows.batch((0, 1))
    padding = batch.document_ids < 0
    assert int((~padding).sum()) == rows.lengths[0] + rows.lengths[1]
    assert not batch.loss_mask[padding].any() and not batch.aux_TAH[padding].any() and not batch.last_TH[padding].any()
    assert batch.document_ids[~padding].unique().tolist() == [0, 1]
