"""Attention of unrolled drafts: causal keys of the context, and one key of its own for each later step.

A query row at step s of an unroll sees (a) the context keys of step 0 up to its own index, in its own document and
window, and (b) the keys that the same row made at steps 1..s. Part (a) is cut into pieces, a run of query rows
against the run of keys before them, so that no [T, T] matrix exists; part (b) is a handful of dot products. The two
meet by their log-sum-exps. In the backward pass the usual formulas are exact for each part by itself once its weights
are scaled to the merged log-sum-exp (as in ring attention, arXiv 2310.01889).

Documents are short beside T and most rows are not drafted from, so pieces cost little next to the projections;
plain float32 products beat the fused bfloat16 kernels of the CPU there by a factor of four, most of all backwards.
A GPU takes the same plan as one kernel, see `flex`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from speculators_core.algorithms._blocks import flex
from speculators_core.algorithms._blocks.precision import as_written

BLOCK = 128
"""Query rows of a piece: bounds the scores that exist at a time to [heads, BLOCK, keys]."""
GAP = 32
"""Rows of a document at most this far apart share a piece: keys in between cost less than a piece of their own."""
KEPT_WEIGHTS = 2**24
"""Attention weights (64 MB of float32) that are kept for the backward pass; above, it forms them again."""


@dataclass(frozen=True)
class Piece:
    """Query rows `query` against context keys `key`; `hidden` bool [queries, last keys] marks what is not seen.

    `hidden` covers the last keys only: without a window everything before them is seen.
    """

    query: slice
    key: slice
    hidden: Tensor

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Products [g, n, queries, keys] with −inf where a key is not seen."""
        scores = _product(q[:, :, self.query], k[:, self.key].mT)
        scores[..., -self.hidden.shape[1] :].masked_fill_(self.hidden, float("-inf"))
        return scores


@dataclass(frozen=True)
class AttentionPlan:
    """Pieces in which query rows meet context keys: each query row is in exactly one, and sees at least one key.

    low_R, high_R int64: the same by row: context keys [low, high) are seen.
    """

    pieces: tuple[Piece, ...]
    cells: int
    low_R: Tensor
    high_R: Tensor
    masks: dict[int, BlockMask] = field(default_factory=dict)

    def keeps(self, heads: int) -> bool:
        """Whether the weights of all pieces are few enough to be kept."""
        return self.cells * heads <= KEPT_WEIGHTS

    def mask(self, num_context: int, steps: int) -> BlockMask:
        """For one kernel over the context and the own keys of so many later steps; made once for each number."""
        if steps not in self.masks:
            row_R = torch.arange(self.low_R.numel(), device=self.low_R.device)
            own_P = row_R.repeat(steps)
            sight = flex.Sight(
                low_Q=self.low_R,
                high_Q=self.high_R,
                owner_Q=row_R,
                slot_Q=torch.zeros_like(row_R),
                owner_P=own_P,
                slot_P=torch.zeros_like(own_P),
                seen_BB=torch.ones(1, 1, dtype=torch.bool, device=row_R.device),
            )
            self.masks[steps] = sight.mask(num_context)
        return self.masks[steps]


def plan_attention(
    document_ids_T: Tensor, rows_R: Tensor | None, window: int | None, *, shift: int = 0
) -> AttentionPlan:
    """Cut causal attention inside documents into pieces.

    Args:
        document_ids_T: int64 [T]; each document is one run; −1 is padding, where a token sees itself alone.
        rows_R: ascending query rows, None for all.
        window: keys that a query sees, itself included; None for all.
        shift: how far ahead of its row the query's position is; the window moves on by as much.
    """
    documents = document_ids_T.tolist()
    rows = list(range(len(documents))) if rows_R is None else rows_R.tolist()
    reach = None if window is None else max(window - shift, 1)
    starts = _document_starts(documents)
    triangle = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=document_ids_T.device).triu_(1)
    pieces: list[Piece] = []
    cells = 0
    for first, count in _runs(documents, rows):
        start = starts[rows[first]]
        for low in range(first, first + count, BLOCK):
            high = min(low + BLOCK, first + count)
            begin, end = rows[low], rows[high - 1] + 1
            key_low = start if reach is None else max(start, begin - reach + 1)
            cut = reach if reach is not None and end - key_low > reach else None
            if end - begin == high - low and cut is None:
                hidden = triangle[: high - low, : high - low]
            else:
                key_first = begin if cut is None else key_low
                distance = torch.tensor(rows[low:high])[:, None] - torch.arange(key_first, end)
                hidden = distance < 0 if cut is None else (distance < 0) | (distance >= cut)
                hidden = hidden.to(triangle.device)
            pieces.append(Piece(slice(low, high), slice(key_low, end), hidden))
            cells += (high - low) * (end - key_low)
    lows = [starts[row] if reach is None else max(starts[row], row - reach + 1) for row in rows]
    low_R, row_R = torch.tensor([lows, rows], dtype=torch.int64, device=document_ids_T.device)
    return AttentionPlan(tuple(pieces), cells, low_R, row_R + 1)


def _document_starts(documents: Sequence[int]) -> list[int]:
    """Index of the first token of each token's document; padding tokens are documents of one."""
    starts: list[int] = []
    for index, document in enumerate(documents):
        joins = index > 0 and document != -1 and documents[index - 1] == document
        starts.append(starts[-1] if joins else index)
    return starts


def _runs(documents: Sequence[int], rows: Sequence[int]) -> list[tuple[int, int]]:
    """(index into rows, length) of maximal runs of rows inside one document, neighbours at most GAP apart."""
    runs: list[tuple[int, int]] = []
    for index, row in enumerate(rows):
        before = rows[index - 1]
        if index > 0 and row - before <= GAP and documents[before] == documents[row] != -1:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((index, 1))
    return runs


def attend(
    query_RhE: Tensor,
    key_TgE: Tensor,
    value_TgE: Tensor,
    plan: AttentionPlan,
    own_keys: Sequence[Tensor] = (),
    own_values: Sequence[Tensor] = (),
) -> Tensor:
    """Softmax attention over a plan's context keys and each row's own later keys; float32 inside, on a CPU.

    Args:
        query_RhE: [R, heads, head_dim].
        key_TgE, value_TgE: context [T, kv heads, head_dim]; kv heads divide heads.
        plan: which query meets which key.
        own_keys, own_values: for each later step [R, kv heads, head_dim]: row r meets row r only.

    Returns:
        [R, heads, head_dim] in the query's dtype.
    """
    assert len(own_keys) == len(own_values)
    if flex.takes(query_RhE):
        mask = plan.mask(key_TgE.shape[0], len(own_keys))
        return flex.attend_ranges(query_RhE, torch.cat([key_TgE, *own_keys]), torch.cat([value_TgE, *own_values]), mask)
    result: Tensor = _Attend.apply(  # type: ignore[no-untyped-call]
        plan, query_RhE, key_TgE, value_TgE, *own_keys, *own_values
    )
    return result


class _Attend(torch.autograd.Function):
    """Inside, heads come first: queries [g, n, R, E] (n query heads share a kv head), keys [g, T, E]."""

    @staticmethod
    @as_written
    def forward(ctx: Any, plan: AttentionPlan, query: Tensor, key: Tensor, value: Tensor, *own: Tensor) -> Tensor:
        kv_heads = key.shape[1]
        q, k, v = _heads_first(query, kv_heads, scale=query.shape[-1] ** -0.5), _keys_first(key), _keys_first(value)
        own = tuple(_heads_first(tensor, kv_heads) for tensor in own)
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:-1], dtype=q.dtype, device=q.device)
        keep = plan.keeps(query.shape[1])
        kept: list[Tensor] = []
        for piece in plan.pieces:
            scores = piece.scores(q, k)
            weights = torch.softmax(scores, dim=-1)
            out[:, :, piece.query] = _product(weights, v[:, piece.key])
            # the log-sum-exp without a second pass of exponentials: top score minus its log-weight
            lse[:, :, piece.query] = scores.amax(-1).sub_(weights.amax(-1).log_())
            if keep:
                kept.append(weights)
        steps = len(own) // 2
        share = torch.ones((), dtype=q.dtype, device=q.device)  # of the context, beside the own keys
        own_weights: list[Tensor] = []
        if steps:
            own_scores = [(q * keys).sum(-1) for keys in own[:steps]]
            merged = torch.logsumexp(torch.stack([lse, *own_scores]), dim=0)
            share = torch.exp(lse - merged)[..., None]
            own_weights = [torch.exp(score - merged)[..., None] for score in own_scores]
            out *= share
            for weight, values in zip(own_weights, own[steps:], strict=True):
                out.addcmul_(values, weight)
        ctx.save_for_backward(q, k, v, out, lse, share, *own, *own_weights, *kept)
        ctx.plan, ctx.steps, ctx.keep, ctx.dtypes = plan, steps, keep, (query.dtype, key.dtype, value.dtype)
        return _rows_first(out, query.dtype)

    @staticmethod
    @as_written
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        steps: int = ctx.steps
        q, k, v, out, lse, share, *rest = ctx.saved_tensors
        own, own_weights, kept = rest[: 2 * steps], rest[2 * steps : 3 * steps], rest[3 * steps :]
        grad = _heads_first(upstream[0], k.shape[0])
        along = (grad * out).sum(-1, keepdim=True)
        # weights of the context count by its share: laid on the rows once instead of on every weight
        grad_context, along_context = (grad * share, along * share) if steps else (grad, along)
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for number, piece in enumerate(ctx.plan.pieces):
            rows, keys = piece.query, piece.key
            weights = kept[number] if ctx.keep else piece.scores(q, k).sub_(lse[:, :, rows, None]).exp_()
            piece_grad = grad_context[:, :, rows]
            slope = _product(piece_grad, v[:, keys].mT).sub_(along_context[:, :, rows]).mul_(weights)
            grad_q[:, :, rows] = _product(slope, k[:, keys])
            grad_k[:, keys] += slope.flatten(1, 2).mT @ q[:, :, rows].flatten(1, 2)
            grad_v[:, keys] += weights.flatten(1, 2).mT @ piece_grad.flatten(1, 2)
        query_dtype, key_dtype, value_dtype = ctx.dtypes
        own_key_grads, own_value_grads = [], []
        for keys_own, values_own, weight in zip(own[:steps], own[steps:], own_weights, strict=True):
            slope_own = ((grad * values_own).sum(-1, keepdim=True) - along) * weight
            grad_q.addcmul_(slope_own, keys_own)
            own_key_grads.append(_rows_first((q * slope_own).sum(1, keepdim=True), key_dtype))
            own_value_grads.append(_rows_first((grad * weight).sum(1, keepdim=True), value_dtype))
        return (
            None,
            _rows_first(grad_q.mul_(q.shape[-1] ** -0.5), query_dtype),
            _rows_first(grad_k[:, None], key_dtype),
            _rows_first(grad_v[:, None], value_dtype),
            *own_key_grads,
            *own_value_grads,
        )


def _heads_first(x_RhE: Tensor, kv_heads: int, *, scale: float = 1.0) -> Tensor:
    """[R, heads, E] to [kv heads, heads of each, R, E], at least float32, scaled."""
    wide = torch.promote_types(x_RhE.dtype, torch.float32)
    rows, heads, size = x_RhE.shape
    moved = x_RhE.view(rows, kv_heads, heads // kv_heads, size).permute(1, 2, 0, 3)
    moved = moved.to(wide, memory_format=torch.contiguous_format, copy=True)
    return moved if scale == 1.0 else moved.mul_(scale)


def _keys_first(x_TgE: Tensor) -> Tensor:
    """[T, kv heads, E] to [kv heads, T, E], at least float32."""
    return _heads_first(x_TgE, x_TgE.shape[1])[:, 0]


def _rows_first(x_gnRE: Tensor, dtype: torch.dtype) -> Tensor:
    """[kv heads, heads of each, R, E] to [R, heads, E]."""
    kv_heads, each, rows, size = x_gnRE.shape
    moved = x_gnRE.permute(2, 0, 1, 3).to(dtype, memory_format=torch.contiguous_format)
    return moved.reshape(rows, kv_heads * each, size)


def _product(left_gnRC: Tensor, right_gCE: Tensor) -> Tensor:
    """Batched product in which n heads share the right factor."""
    kv_heads, each, rows, _ = left_gnRC.shape
    return (left_gnRC.flatten(1, 2) @ right_gCE).view(kv_heads, each, rows, -1)
