"""Attention as one kernel: the same as in pieces, gradients included."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from speculators_core.algorithms._blocks import flex
from speculators_core.algorithms._blocks.attention import attend, plan_attention
from speculators_core.algorithms._blocks.block_attention import attend_blocks, plan_blocks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
HEADS, GROUPS, SIZE, SLOTS = 8, 2, 64, 8


def documents(total: int) -> Tensor:
    """Three documents and padding."""
    bounds = (0, total // 5, total // 2, total - 20)
    pieces = [torch.full((end - begin,), index) for index, (begin, end) in enumerate(pairwise(bounds))]
    return torch.cat([*pieces, torch.full((20,), -1)]).cuda()


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).requires_grad_()


def both_ways(monkeypatch: pytest.MonkeyPatch, run, inputs: list[Tensor]) -> None:  # type: ignore[no-untyped-def]
    """`run` by the kernel and in pieces: outputs and gradients agree to bfloat16."""
    found = []
    for kernel in (True, False):
        monkeypatch.setattr(flex, "takes", lambda _, kernel=kernel: kernel)
        out = run()
        found.append((out, *torch.autograd.grad(out, inputs, torch.ones_like(out))))
    for ours, theirs in zip(*found, strict=True):
        worst = (ours.float() - theirs.float()).abs().max() / theirs.float().abs().max()
        assert worst < flex.TOLERANCE, worst


def test_the_kernel_is_taken_here() -> None:
    assert flex.takes(draw(4, HEADS, SIZE)), "see the log for why not"
    assert not flex.takes(draw(4, HEADS, SIZE).double()) and not flex.takes(draw(0, HEADS, SIZE))


@pytest.mark.parametrize("total", [300, 1031, 2048])  # row after row of another length: compiled once, not for each
@pytest.mark.parametrize(("window", "steps"), [(None, 0), (64, 2)])
def test_unrolled_attention(monkeypatch: pytest.MonkeyPatch, total: int, window: int | None, steps: int) -> None:
    torch.manual_seed(total)
    rows = torch.arange(0, total, 3, device="cuda")
    plan = plan_attention(documents(total), rows, window)
    q, k, v = draw(rows.numel(), HEADS, SIZE), draw(total, GROUPS, SIZE), draw(total, GROUPS, SIZE)
    own_k, own_v = ([draw(rows.numel(), GROUPS, SIZE) for _ in range(steps)] for _ in range(2))
    both_ways(monkeypatch, lambda: attend(q, k, v, plan, own_k, own_v), [q, k, v, *own_k, *own_v])


@pytest.mark.parametrize("total", [300, 1031, 2048])
@pytest.mark.parametrize(("window", "causal", "asking"), [(None, True, SLOTS), (64, False, SLOTS - 1)])
def test_attention_of_blocks(
    monkeypatch: pytest.MonkeyPatch, total: int, window: int | None, causal: bool, asking: int
) -> None:
    torch.manual_seed(total)
    anchors = torch.arange(1, total - SLOTS, 5, device="cuda")
    plan = plan_blocks(documents(total), anchors, SLOTS, window=window, causal=causal)
    blocks = anchors.numel()
    q, k, v = draw(blocks, asking, HEADS, SIZE), draw(total, GROUPS, SIZE), draw(total, GROUPS, SIZE)
    own_k, own_v = draw(blocks, SLOTS, GROUPS, SIZE), draw(blocks, SLOTS, GROUPS, SIZE)
    both_ways(monkeypatch, lambda: attend_blocks(q, k, v, own_k, own_v, plan), [q, k, v, own_k, own_v])
