"""Attention over ranges of keys as one kernel: PyTorch's flex attention, for devices where it is compiled.

Every attention of our drafts has one form: a query sees a run of context keys, and keys that were made for it alone.
On a CPU the cut pieces of `attention` and `block_attention` are faster and bounded; on a GPU they are many small
kernels, and one that skips blocks of keys nobody sees takes their place. It has to show on each device, before it is
used there, that it computes the same.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from speculators_core.algorithms._blocks.precision import as_written

log = logging.getLogger(__name__)
TOLERANCE = 0.03
"""Of the largest value: what bfloat16 products may differ by."""
_SMALLEST_HEAD = 16


@dataclass(frozen=True)
class Sight:
    """Which query sees which key.

    low_Q, high_Q int64: context keys [low, high) are seen · owner_Q, slot_Q int64: whose own keys, and as which slot ·
    owner_P, slot_P int64: the same of each own key, which lie behind the context · seen_BB bool: seen_BB[q, k] where
    slot q sees slot k of its owner.
    """

    low_Q: Tensor
    high_Q: Tensor
    owner_Q: Tensor
    slot_Q: Tensor
    owner_P: Tensor
    slot_P: Tensor
    seen_BB: Tensor

    def mask(self, num_context: int) -> BlockMask:
        """For the kernel, with `num_context` keys before the own ones."""
        owner_K = torch.cat([self.owner_P.new_full((num_context,), -1), self.owner_P])
        slot_K = torch.cat([self.slot_P.new_zeros(num_context), self.slot_P])
        low, high, owner, slot, seen = self.low_Q, self.high_Q, self.owner_Q, self.slot_Q, self.seen_BB

        def sees(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            context = (owner_K[k] < 0) & (k >= low[q]) & (k < high[q])
            return context | ((owner_K[k] == owner[q]) & seen[slot[q], slot_K[k]])

        device = low.device
        return create_block_mask(
            sees, None, None, low.numel(), owner_K.numel(), device=device, _compile=device.type != "cpu"
        )


def attend_ranges(query_QhE: Tensor, key_KgE: Tensor, value_KgE: Tensor, mask: BlockMask) -> Tensor:
    """Softmax attention by a mask; products in autocast's dtype where it is on, else in the widest of the inputs.

    Args:
        query_QhE: [Q, heads, head_dim].
        key_KgE, value_KgE: [K, kv heads, head_dim], context keys before own ones; kv heads divide heads.
        mask: of `Sight.mask`; every query sees a key.

    Returns:
        [Q, heads, head_dim] in the query's dtype.
    """
    device = query_QhE.device.type
    dtype = torch.promote_types(query_QhE.dtype, torch.promote_types(key_KgE.dtype, value_KgE.dtype))
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    q, k, v = (tensor.to(dtype).transpose(0, 1)[None] for tensor in (query_QhE, key_KgE, value_KgE))
    out = _run(q, k, v, mask)
    return out[0].transpose(0, 1).to(query_QhE.dtype)


@as_written
def _run(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    kernel = _kernel(q.device.type != "cpu")
    out: Tensor = kernel(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    return out


@functools.cache
def _kernel(compiled: bool) -> Callable[..., Any]:
    plain: Callable[..., Any] = flex_attention
    return torch.compile(plain, dynamic=True) if compiled else plain


def takes(query: Tensor) -> bool:
    """Whether attention of such a query goes through the kernel: on a device that compiles it and computes the same."""
    if query.device.type == "cpu" or query.dtype == torch.float64 or query.shape[-1] < _SMALLEST_HEAD:
        return False
    return query.numel() > 0 and agrees(query.device)


@functools.cache
def agrees(device: torch.device) -> bool:
    """Whether the kernel's output and gradients are those of the plain definition, on a small case; said where not."""
    try:
        difference = _difference(device)
    except RuntimeError as error:  # no compiler, no kernel for the device: all of torch's are RuntimeErrors
        log.warning("attention on %s goes without the fused kernel: %s", device, str(error).splitlines()[0])
        return False
    if not difference <= TOLERANCE:
        log.warning("attention on %s goes without the fused kernel: it differs by %.3f there", device, difference)
        return False
    log.info("attention on %s goes through the fused kernel, which differs by %.4f", device, difference)
    return True


def _difference(device: torch.device) -> float:
    """Largest difference of output and gradients on a case with ranges and own keys, relative to the largest value."""
    queries, context, heads, groups, size = 200, 300, 4, 2, 64
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, torch.bfloat16).requires_grad_()

    index_Q = torch.arange(queries, device=device)
    sight = Sight(
        low_Q=(index_Q - 50).clamp_min(0),
        high_Q=index_Q + 1,
        owner_Q=index_Q // 4,
        slot_Q=index_Q % 4,
        owner_P=index_Q // 4,
        slot_P=index_Q % 4,
        seen_BB=torch.ones(4, 4, dtype=torch.bool, device=device).tril(),
    )
    inputs = draw(queries, heads, size), draw(context + queries, groups, size), draw(context + queries, groups, size)
    upstream = draw(queries, heads, size).detach()
    ours = attend_ranges(*inputs, sight.mask(context))
    theirs = _plain(*inputs, sight, context)
    pairs = zip(
        (ours, *torch.autograd.grad(ours, inputs, upstream)),
        (theirs, *torch.autograd.grad(theirs, inputs, upstream.to(theirs.dtype))),
        strict=True,
    )
    return max(float((a.float() - b.float()).abs().max() / b.float().abs().max()) for a, b in pairs)


def _plain(query_QhE: Tensor, key_KgE: Tensor, value_KgE: Tensor, sight: Sight, context: int) -> Tensor:
    """The definition, with all scores in memory."""
    each = query_QhE.shape[1] // key_KgE.shape[1]
    key, value = (tensor.float().repeat_interleave(each, dim=1) for tensor in (key_KgE, value_KgE))
    index_C = torch.arange(context, device=key.device)
    seen_QC = (index_C >= sight.low_Q[:, None]) & (index_C < sight.high_Q[:, None])
    seen_QP = (sight.owner_Q[:, None] == sight.owner_P) & sight.seen_BB[sight.slot_Q][:, sight.slot_P]
    scores = torch.einsum("qhe,khe->hqk", query_QhE.float(), key) * query_QhE.shape[-1] ** -0.5
    weights = scores.masked_fill(~torch.cat([seen_QC, seen_QP], dim=1), float("-inf")).softmax(-1)
    return torch.einsum("hqk,khe->qhe", weights, value)
