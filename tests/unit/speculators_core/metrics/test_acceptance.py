from __future__ import annotations

import torch

from speculators_core.metrics.acceptance import unrolled_metrics
from speculators_core.types import Counted

YES, NO = True, False
CORRECT = torch.tensor([[YES, YES, NO, YES], [YES, NO, YES, YES], [YES, YES, YES, NO]])


def test_a_chain_is_accepted_up_to_its_first_miss() -> None:
    metrics = unrolled_metrics(CORRECT, torch.ones(3, 4, dtype=torch.bool))
    assert [metrics[f"full_acc_{k}"] for k in range(3)] == [Counted(3, 4), Counted(2, 4), Counted(1, 4)]
    assert [metrics[f"cond_acc_{k}"] for k in range(3)] == [Counted(3, 4), Counted(2, 3), Counted(1, 2)]
    assert metrics["eal"] == Counted(4 + 3 + 2 + 1, 4)


def test_rows_that_do_not_count_are_left_out() -> None:
    counted = torch.tensor([[YES, YES, YES, NO], [YES, YES, NO, NO], [NO, NO, NO, NO]])
    metrics = unrolled_metrics(CORRECT, counted)
    assert [metrics[f"full_acc_{k}"] for k in range(3)] == [Counted(2, 3), Counted(1, 2), Counted(0, 0)]
    assert metrics["eal"] == Counted(3 + 2 + 1, 3)


def test_batches_pool_exactly() -> None:
    counted = torch.ones(3, 4, dtype=torch.bool)
    whole = unrolled_metrics(CORRECT, counted)
    halves = [unrolled_metrics(CORRECT[:, rows], counted[:, rows]) for rows in (slice(0, 1), slice(1, 4))]
    assert {name: halves[0][name] + halves[1][name] for name in whole} == whole
