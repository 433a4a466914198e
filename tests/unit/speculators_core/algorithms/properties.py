"""What holds of every objective, asked of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

from speculators_core.types import Aligned, Objective
from tests.unit.speculators_core.algorithms.blocks import replies_of, served
from tests.unit.speculators_core.algorithms.tiny import pack, sample

Draft = TypeVar("Draft", bound=nn.Module)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Those of the trained parameters, by name."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def check_that_packed_is_unpacked(model: nn.Module, objective: Objective) -> None:
    """Rows packed together have the loss, gradients and metrics of the same rows one by one."""
    rows = [objective.align(sample(n, [(3, n - 1)], seed=n)) for n in (12, 17, 9)]
    packed = pack(rows, 40)
    denominators = objective.denominators(packed)
    together = objective.step(model, packed, denominators)
    together.loss.backward()  # type: ignore[no-untyped-call]
    expected = gradients(model)
    model.zero_grad()
    total = torch.zeros(())
    pooled: dict[str, Any] = {}
    for row in rows:
        result = objective.step(model, pack([row], row.input_ids.numel()), denominators)
        result.loss.backward()  # type: ignore[no-untyped-call]
        total = total + result.loss.detach()
        for name, value in result.metrics.items():
            pooled[name] = pooled[name] + value if name in pooled else value
    torch.testing.assert_close(total, together.loss.detach())
    found = gradients(model)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-6)
    for name, value in together.metrics.items():
        assert pooled[name].sum == pytest.approx(value.sum, rel=1e-4, abs=1e-6), name
        assert pooled[name].count == pytest.approx(value.count), name


def check_that_the_walk_is_the_served_loop(
    model: Draft, objective: Objective, propose: Callable[[Draft, Aligned, int, int], list[int]]
) -> None:
    """The walk of two replies, of which the draft guesses some, accepts what drafting from every point would."""
    aligned = objective.align(sample(40, [(5, 19), (24, 39)]))
    aligned = replace(aligned, input_ids=replies_of(aligned, lambda row, at: propose(model, row, at, 3)))
    walked = objective.walk(model, aligned, 3)
    assert list(walked) == served(aligned, 3, lambda at: propose(model, aligned, at, 3))
    assert sum(walked) > 0 and min(walked) < 3
