from __future__ import annotations

import pytest
import torch
from torch import Tensor

from speculators_core.algorithms._blocks import attention, flex
from speculators_core.algorithms._blocks.attention import attend, plan_attention

DOCUMENTS = torch.tensor([0] * 9 + [1] * 5 + [2] * 12 + [-1] * 4)
HEADS, KV_HEADS, SIZE = 4, 2, 8


def dense_mask(rows: Tensor, steps: int, window: int | None, shift: int) -> Tensor:
    """The definition: [R, T + steps·R] over context keys and every row's own later keys."""
    total = DOCUMENTS.numel()
    key = torch.arange(total)
    distance = rows[:, None] - key
    seen = (distance >= 0) & (DOCUMENTS[rows][:, None] == DOCUMENTS) & (DOCUMENTS[rows][:, None] >= 0)
    if window is not None:
        seen &= distance < max(window - shift, 1)
    seen |= distance == 0
    own = torch.eye(rows.numel(), dtype=torch.bool)
    return torch.cat([seen, *[own] * steps], dim=1)


def reference(q: Tensor, k: Tensor, v: Tensor, own_k: list[Tensor], own_v: list[Tensor], mask: Tensor) -> Tensor:
    keys = torch.cat([k, *own_k]).repeat_interleave(HEADS // KV_HEADS, dim=1)
    values = torch.cat([v, *own_v]).repeat_interleave(HEADS // KV_HEADS, dim=1)
    scores = torch.einsum("rhe,the->hrt", q, keys) * SIZE**-0.5
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("hrt,the->rhe", weights, values)


@pytest.mark.parametrize(("block", "kept"), [(3, 0), (3, 2**24), (128, 2**24)])
@pytest.mark.parametrize(("window", "shift"), [(None, 0), (4, 0), (4, 2), (1, 3), (64, 1)])
@pytest.mark.parametrize("rows", [None, [0, 4, 5, 6, 8, 9, 13, 20, 21, 25, 27, 28]])
@pytest.mark.parametrize("steps", [0, 2])
def test_pieces_and_own_keys_are_the_dense_mask(
    monkeypatch: pytest.MonkeyPatch,
    block: int,
    kept: int,
    window: int | None,
    shift: int,
    rows: list[int] | None,
    steps: int,
) -> None:
    monkeypatch.setattr(attention, "BLOCK", block)
    monkeypatch.setattr(attention, "KEPT_WEIGHTS", kept)
    total = DOCUMENTS.numel()
    chosen = torch.arange(total) if rows is None else torch.tensor(rows)
    count = chosen.numel()

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    torch.manual_seed(0)
    q, k, v = draw(count, HEADS, SIZE), draw(total, KV_HEADS, SIZE), draw(total, KV_HEADS, SIZE)
    own_k = [draw(count, KV_HEADS, SIZE) for _ in range(steps)]
    own_v = [draw(count, KV_HEADS, SIZE) for _ in range(steps)]
    plan = plan_attention(DOCUMENTS, None if rows is None else chosen, window, shift=shift)
    out = attend(q, k, v, plan, own_k, own_v)
    expected = reference(q, k, v, own_k, own_v, dense_mask(chosen, steps, window, shift))
    torch.testing.assert_close(out, expected)
    # on a CPU the kernel of other devices has no gradients
    keys, values = torch.cat([k, *own_k]).detach(), torch.cat([v, *own_v]).detach()
    in_one = flex.attend_ranges(q.detach(), keys, values, plan.mask(total, steps))
    torch.testing.assert_close(in_one, expected.detach())
    upstream = torch.randn_like(out)
    inputs = [q, k, v, *own_k, *own_v]
    for ours, theirs in zip(
        torch.autograd.grad(out, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_bfloat16_goes_in_and_out_with_float32_between() -> None:
    torch.manual_seed(0)
    q = torch.randn(30, HEADS, SIZE).bfloat16()
    k, v = (torch.randn(30, KV_HEADS, SIZE).bfloat16() for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        out = attend(q, k, v, plan_attention(DOCUMENTS, None, None))
    exact = attend(q.double(), k.double(), v.double(), plan_attention(DOCUMENTS, None, None))
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, exact.to(torch.bfloat16)) or (out.double() - exact).abs().max() < 2e-2
    assert (out.double() - exact).abs().mean() < 2e-3


def test_work_grows_with_documents_not_with_the_row() -> None:
    documents = torch.arange(64).repeat_interleave(16)
    assert plan_attention(documents, None, None).cells == 64 * 16 * 16
