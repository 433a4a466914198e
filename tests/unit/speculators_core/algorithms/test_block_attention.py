from __future__ import annotations

import pytest
import torch
from torch import Tensor

from speculators_core.algorithms._blocks import block_attention, flex
from speculators_core.algorithms._blocks.block_attention import attend_blocks, plan_blocks

DOCUMENTS = torch.tensor([0] * 9 + [1] * 5 + [2] * 12 + [-1] * 4)
ANCHORS = torch.tensor([0, 1, 4, 8, 9, 13, 15, 20, 21, 25, 27])
HEADS, KV_HEADS, SIZE, SLOTS = 4, 2, 8, 5


def dense_mask(window: int | None, causal: bool, from_anchor: bool) -> Tensor:
    """The definition: bool [M, B, T + M·B] over context keys and the slots of every block."""
    blocks = ANCHORS.numel()
    key, slot = torch.arange(DOCUMENTS.numel()), torch.arange(SLOTS)
    anchor = ANCHORS[:, None, None]
    same = (DOCUMENTS[ANCHORS][:, None, None] == DOCUMENTS) & (DOCUMENTS >= 0)
    context = (same & (key < anchor)).expand(blocks, SLOTS, -1)
    distance = slot[:, None] - slot
    own = distance >= 0 if causal else torch.ones(SLOTS, SLOTS, dtype=torch.bool)
    if window is not None and from_anchor:
        context = context & (key >= anchor - window)
    elif window is not None:
        context = context & (anchor + slot[:, None] - key < window)
        own = own & (distance.abs() < window)
    others = torch.zeros(blocks, SLOTS, blocks, SLOTS, dtype=torch.bool)
    others[torch.arange(blocks), :, torch.arange(blocks)] = own
    return torch.cat([context, others.flatten(2)], dim=2)


def reference(q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, mask: Tensor) -> Tensor:
    keys = torch.cat([k, own_k.flatten(0, 1)]).repeat_interleave(HEADS // KV_HEADS, dim=1)
    values = torch.cat([v, own_v.flatten(0, 1)]).repeat_interleave(HEADS // KV_HEADS, dim=1)
    scores = torch.einsum("mqhe,the->hmqt", q, keys) * SIZE**-0.5
    weights = scores.masked_fill(~mask[:, -q.shape[1] :], float("-inf")).softmax(-1)
    return torch.einsum("hmqt,the->mqhe", weights, values)


@pytest.mark.parametrize(("queries", "kept"), [(1, 0), (12, 2**24), (256, 2**24)])
@pytest.mark.parametrize("window", [None, 1, 3, 6, 40])
@pytest.mark.parametrize(("causal", "from_anchor"), [(True, False), (False, False), (True, True), (False, True)])
@pytest.mark.parametrize("asking", [SLOTS, SLOTS - 1])
def test_pieces_are_the_dense_mask(
    monkeypatch: pytest.MonkeyPatch,
    queries: int,
    kept: int,
    window: int | None,
    causal: bool,
    from_anchor: bool,
    asking: int,
) -> None:
    monkeypatch.setattr(block_attention, "QUERIES", queries)
    monkeypatch.setattr(block_attention, "KEPT_WEIGHTS", kept)
    blocks, total = ANCHORS.numel(), DOCUMENTS.numel()

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    torch.manual_seed(0)
    q, k, v = draw(blocks, asking, HEADS, SIZE), draw(total, KV_HEADS, SIZE), draw(total, KV_HEADS, SIZE)
    own_k, own_v = draw(blocks, SLOTS, KV_HEADS, SIZE), draw(blocks, SLOTS, KV_HEADS, SIZE)
    plan = plan_blocks(DOCUMENTS, ANCHORS, SLOTS, window=window, causal=causal, from_anchor=from_anchor)
    out = attend_blocks(q, k, v, own_k, own_v, plan)
    expected = reference(q, k, v, own_k, own_v, dense_mask(window, causal, from_anchor))
    torch.testing.assert_close(out, expected)
    # on a CPU the kernel of other devices has no gradients
    keys, values = torch.cat([k, own_k.flatten(0, 1)]).detach(), torch.cat([v, own_v.flatten(0, 1)]).detach()
    in_one = flex.attend_ranges(q.detach().flatten(0, 1), keys, values, plan.mask(total, asking))
    torch.testing.assert_close(in_one.view_as(expected), expected.detach())
    upstream = torch.randn_like(out)
    inputs = [q, k, v, own_k, own_v]
    for ours, theirs in zip(
        torch.autograd.grad(out, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_work_grows_with_documents_and_windows_not_with_the_row() -> None:
    documents = torch.arange(64).repeat_interleave(16)
    anchors = torch.arange(0, 1024, 2)
    plan = plan_blocks(documents, anchors, 4, window=None, causal=True)
    assert plan.cells <= anchors.numel() * 4 * (16 + 4)
    long = torch.zeros(1024, dtype=torch.int64)
    plan = plan_blocks(long, anchors, 4, window=32, causal=True)
    assert plan.cells <= anchors.numel() * 4 * (32 + 2 * block_attention.QUERIES // 4 + 4)
