"""Attention of drafted blocks: the queries of a block meet a run of context keys and the keys of their own block.

The block with anchor p sees the context of its document strictly before p. Blocks are sorted by anchor, so a few
neighbours share nearly all of their context: they form a piece, whose queries meet the same run of keys in one product,
with the few keys that not all of them see masked. Own keys are a batched product of block with block. So no
[M·B, T] matrix exists, and the work grows with documents and windows, not with the row. A GPU takes the same plan as
one kernel, see `flex`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from speculators_core.algorithms._blocks import flex
from speculators_core.algorithms._blocks.precision import as_written

QUERIES = 256
"""Query rows of a piece: neighbours enough for large products, few enough that little of their context differs."""
KEPT_WEIGHTS = 2**24
"""Attention weights (64 MB of float32) that are kept for the backward pass; above, it forms them again."""


@dataclass(frozen=True)
class BlockPiece:
    """Blocks `blocks` against context keys `keys`; `hidden` bool [blocks, B or 1, last keys] marks what is not seen."""

    blocks: slice
    keys: slice
    hidden: Tensor


@dataclass(frozen=True)
class BlockPlan:
    """Pieces in which blocks meet the context (every block is in exactly one), and which own slots a slot sees.

    own_hidden bool [B, B]: own_hidden[q, k] where slot q does not see slot k · low_MB, high_MB int64: what the pieces
    say, by slot: context keys [low, high) are seen.
    """

    pieces: tuple[BlockPiece, ...]
    own_hidden: Tensor
    cells: int
    low_MB: Tensor
    high_MB: Tensor
    masks: dict[int, BlockMask] = field(default_factory=dict)

    def keeps(self, heads: int) -> bool:
        """Whether the weights of all pieces are few enough to be kept."""
        return self.cells * heads <= KEPT_WEIGHTS

    def mask(self, num_context: int, asking: int) -> BlockMask:
        """For one kernel in which the last `asking` slots of every block ask; made once for each number."""
        if asking not in self.masks:
            blocks, slots = self.low_MB.shape
            block_MB = torch.arange(blocks, device=self.low_MB.device)[:, None].expand(blocks, slots)
            slot_MB = torch.arange(slots, device=self.low_MB.device).expand(blocks, slots)
            sight = flex.Sight(
                low_Q=self.low_MB[:, -asking:].flatten(),
                high_Q=self.high_MB[:, -asking:].flatten(),
                owner_Q=block_MB[:, -asking:].flatten(),
                slot_Q=slot_MB[:, -asking:].flatten(),
                owner_P=block_MB.flatten(),
                slot_P=slot_MB.flatten(),
                seen_BB=~self.own_hidden,
            )
            self.masks[asking] = sight.mask(num_context)
        return self.masks[asking]


def plan_blocks(
    document_ids_T: Tensor,
    anchors_M: Tensor,
    block_size: int,
    *,
    window: int | None,
    causal: bool,
    from_anchor: bool = False,
) -> BlockPlan:
    """Cut the attention of blocks into pieces.

    Args:
        document_ids_T: int64 [T]; each document is one run; −1 is padding, which no block sees.
        anchors_M: int64 [M], ascending and distinct.
        block_size: B; slot k stands at its anchor's position + k.
        window: keys nearer than this are seen, on both sides, each measured from the query's own position, as
            vLLM's backends do; None for no limit.
        causal: whether a slot sees only itself and the slots before it in its block.
        from_anchor: measure the window from the anchor, itself excluded, whatever the slot, as speculators 0.9 does.
    """
    device = document_ids_T.device
    slots_B = torch.arange(block_size, device=device)
    distance_BB = slots_B[:, None] - slots_B
    own_hidden = distance_BB < 0 if causal else torch.zeros_like(distance_BB, dtype=torch.bool)
    if window is not None and not from_anchor:
        own_hidden = own_hidden | (distance_BB.abs() >= window)
    starts_M = _context_starts(document_ids_T, anchors_M)
    anchors, starts = anchors_M.tolist(), starts_M.tolist()
    per_piece = max(1, QUERIES // block_size)
    pieces: list[BlockPiece] = []
    cells = 0
    begin = 0
    while begin < len(anchors):
        end = begin + 1
        while end < len(anchors) and end - begin < per_piece and starts[end] == starts[begin]:
            end += 1
        stop = anchors[end - 1]
        first = starts[begin]
        if window is not None:
            first = max(first, anchors[begin] - window + (0 if from_anchor else 1))
        first = min(first, stop)
        own_anchors_m11 = anchors_M[begin:end, None, None]
        cut = window is not None and stop - first > window - block_size - (end - begin)
        if cut and window is not None:
            positions_mB1 = own_anchors_m11 + (0 if from_anchor else slots_B[None, :, None])
            reach = window if from_anchor else window - 1
            keys = torch.arange(first, stop, device=device)
            hidden = (keys >= own_anchors_m11) | (keys < positions_mB1 - reach)
        else:
            hidden = torch.arange(anchors[begin], stop, device=device) >= own_anchors_m11
        pieces.append(BlockPiece(slice(begin, end), slice(first, stop), hidden))
        cells += (end - begin) * block_size * (stop - first + block_size)
        begin = end
    high_MB = anchors_M[:, None].expand(-1, block_size)
    low_MB = starts_M[:, None].expand(-1, block_size)
    if window is not None:
        nearest_MB = high_MB - window if from_anchor else high_MB + slots_B - window + 1
        low_MB = torch.maximum(low_MB, nearest_MB)
    return BlockPlan(tuple(pieces), own_hidden, cells, low_MB, high_MB)


def _context_starts(document_ids_T: Tensor, anchors_M: Tensor) -> Tensor:
    """Index of the first token of each anchor's document; an anchor in padding has no context."""
    fresh_T = torch.ones_like(document_ids_T, dtype=torch.bool)
    fresh_T[1:] = document_ids_T[1:] != document_ids_T[:-1]
    index_T = torch.arange(document_ids_T.numel(), device=document_ids_T.device)
    first_T = torch.cummax(torch.where(fresh_T, index_T, 0), dim=0).values
    return torch.where(document_ids_T[anchors_M] < 0, anchors_M, first_T[anchors_M])


def attend_blocks(
    query_MQhE: Tensor,
    context_key_TgE: Tensor,
    context_value_TgE: Tensor,
    own_key_MBgE: Tensor,
    own_value_MBgE: Tensor,
    plan: BlockPlan,
) -> Tensor:
    """Softmax attention of block queries over context and own keys; float32 inside, on a CPU.

    Args:
        query_MQhE: [M, Q, heads, head_dim]: the last Q slots of every block ask.
        context_key_TgE, context_value_TgE: [T, kv heads, head_dim]; kv heads divide heads.
        own_key_MBgE, own_value_MBgE: [M, B, kv heads, head_dim].
        plan: which block meets which key.

    Returns:
        [M, Q, heads, head_dim] in the query's dtype.
    """
    if flex.takes(query_MQhE):
        mask = plan.mask(context_key_TgE.shape[0], query_MQhE.shape[1])
        keys = torch.cat([context_key_TgE, own_key_MBgE.flatten(0, 1)])
        values = torch.cat([context_value_TgE, own_value_MBgE.flatten(0, 1)])
        return flex.attend_ranges(query_MQhE.flatten(0, 1), keys, values, mask).view_as(query_MQhE)
    result: Tensor = _AttendBlocks.apply(  # type: ignore[no-untyped-call]
        plan, query_MQhE, context_key_TgE, context_value_TgE, own_key_MBgE, own_value_MBgE
    )
    return result


class _AttendBlocks(torch.autograd.Function):
    """Inside, heads come first: queries [g, n, M, Q, E] (n share a kv head), keys [g, T, E] and [g, M, B, E]."""

    @staticmethod
    @as_written
    def forward(
        ctx: Any, plan: BlockPlan, query: Tensor, key: Tensor, value: Tensor, own_key: Tensor, own_value: Tensor
    ) -> Tensor:
        groups = key.shape[1]
        q = _queries_first(query, groups, scale=query.shape[-1] ** -0.5)
        k, v = _wide(key.permute(1, 0, 2)), _wide(value.permute(1, 0, 2))
        own_k, own_v = _wide(own_key.permute(2, 0, 1, 3)), _wide(own_value.permute(2, 0, 1, 3))
        out = torch.empty_like(q)
        keep = plan.keeps(query.shape[2])
        kept: list[Tensor] = []
        for piece in plan.pieces:
            weights = torch.softmax(_scores(plan, piece, q, k, own_k), dim=-1)
            out[:, :, piece.blocks] = _mix(piece, weights, v, own_v)
            if keep:
                kept.append(weights)
        ctx.save_for_backward(q, k, v, own_k, own_v, out, *kept)
        ctx.plan, ctx.keep = plan, keep
        ctx.dtypes = query.dtype, key.dtype, value.dtype, own_key.dtype, own_value.dtype
        return _queries_last(out, query.dtype)

    @staticmethod
    @as_written
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, own_k, own_v, out, *kept = ctx.saved_tensors
        plan: BlockPlan = ctx.plan
        grad = _queries_first(upstream[0], k.shape[0])
        along = (grad * out).sum(-1, keepdim=True)
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        grad_own_k, grad_own_v = torch.empty_like(own_k), torch.empty_like(own_v)
        for number, piece in enumerate(plan.pieces):
            weights = kept[number] if ctx.keep else torch.softmax(_scores(plan, piece, q, k, own_k), dim=-1)
            blocks, keys = piece.blocks, piece.keys
            length = keys.stop - keys.start
            grad_piece, q_piece = grad[:, :, blocks], q[:, :, blocks]
            slope = torch.empty_like(weights)
            slope[..., :length] = _to_context(grad_piece, v[:, keys])
            slope[..., length:] = _to_own(grad_piece, own_v[:, blocks])
            slope.sub_(along[:, :, blocks]).mul_(weights)
            grad_q[:, :, blocks] = _mix_with(slope, k[:, keys], own_k[:, blocks])
            context_slope, own_slope = slope[..., :length], slope[..., length:]
            grad_k[:, keys] += context_slope.flatten(1, 3).mT @ q_piece.flatten(1, 3)
            grad_v[:, keys] += weights[..., :length].flatten(1, 3).mT @ grad_piece.flatten(1, 3)
            grad_own_k[:, blocks] = _own_sum(own_slope, q_piece)
            grad_own_v[:, blocks] = _own_sum(weights[..., length:], grad_piece)
        query_dtype, key_dtype, value_dtype, own_key_dtype, own_value_dtype = ctx.dtypes
        return (
            None,
            _queries_last(grad_q.mul_(q.shape[-1] ** -0.5), query_dtype),
            grad_k.permute(1, 0, 2).to(key_dtype),
            grad_v.permute(1, 0, 2).to(value_dtype),
            grad_own_k.permute(1, 2, 0, 3).to(own_key_dtype),
            grad_own_v.permute(1, 2, 0, 3).to(own_value_dtype),
        )


def _scores(plan: BlockPlan, piece: BlockPiece, q: Tensor, k: Tensor, own_k: Tensor) -> Tensor:
    """[g, n, m, Q, keys + B] with −inf where a key is not seen."""
    q_piece = q[:, :, piece.blocks]
    asking = q_piece.shape[3]
    context = _to_context(q_piece, k[:, piece.keys])
    hidden = piece.hidden if piece.hidden.shape[1] == 1 else piece.hidden[:, -asking:]
    if hidden.shape[-1]:
        context[..., context.shape[-1] - hidden.shape[-1] :].masked_fill_(hidden, float("-inf"))
    own = _to_own(q_piece, own_k[:, piece.blocks]).masked_fill_(plan.own_hidden[-asking:], float("-inf"))
    return torch.cat((context, own), dim=-1)


def _mix(piece: BlockPiece, weights: Tensor, v: Tensor, own_v: Tensor) -> Tensor:
    return _mix_with(weights, v[:, piece.keys], own_v[:, piece.blocks])


def _mix_with(weights: Tensor, context_gCE: Tensor, own_gmBE: Tensor) -> Tensor:
    """Sum of context and own rows by their weights: [g, n, m, Q, E]."""
    length = context_gCE.shape[1]
    mixed = (weights[..., :length].flatten(1, 3) @ context_gCE).view(*weights.shape[:-1], -1)
    return mixed.add_(weights[..., length:] @ own_gmBE[:, None])


def _to_context(q_gnmQE: Tensor, k_gCE: Tensor) -> Tensor:
    return (q_gnmQE.flatten(1, 3) @ k_gCE.mT).view(*q_gnmQE.shape[:-1], -1)


def _to_own(q_gnmQE: Tensor, k_gmBE: Tensor) -> Tensor:
    return q_gnmQE @ k_gmBE[:, None].mT


def _own_sum(weights_gnmQB: Tensor, rows_gnmQE: Tensor) -> Tensor:
    """Σ over the query heads and slots that met each own key: [g, m, B, E]."""
    return (weights_gnmQB.mT @ rows_gnmQE).sum(1)


def _queries_first(x_MQhE: Tensor, groups: int, *, scale: float = 1.0) -> Tensor:
    """[M, Q, heads, E] to [kv heads, heads of each, M, Q, E], at least float32, scaled."""
    moved = _wide(x_MQhE.reshape(*x_MQhE.shape[:2], groups, -1, x_MQhE.shape[3]).permute(2, 3, 0, 1, 4))
    return moved if scale == 1.0 else moved * scale


def _queries_last(x_gnMQE: Tensor, dtype: torch.dtype) -> Tensor:
    return x_gnMQE.permute(2, 3, 0, 1, 4).to(dtype, memory_format=torch.contiguous_format).flatten(2, 3)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32), memory_format=torch.contiguous_format)
