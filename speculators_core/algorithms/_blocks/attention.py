"""Attention of unrolled drafts: causal keys of the context, and one key of its own for each later step.

A query row at step s of an unroll sees (a) the context keys of step 0 up to its own index, in its own document and
window, and (b) the keys that the same row made at steps 1..s. Part (a) is cut into pieces, a run of query rows
against the run of keys before them, so that no [T, T] matrix exists; part (b) is a handful of dot products. The two
meet by their log-sum-exps. The backward pass rebuilds the weights of a piece from the merged log-sum-exp, with which
the usual formulas are exact for each part by itself (as in ring attention, arXiv 2310.01889).

Documents are short beside T and most rows are not drafted from, so pieces cost little next to the projections;
plain float32 products beat the fused bfloat16 kernels of the CPU there by a factor of four, most of all backwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from speculators_core.algorithms._blocks.precision import as_written

BLOCK = 128
"""Query rows of a piece: bounds the scores that exist at a time to [heads, BLOCK, keys]."""


@dataclass(frozen=True)
class Piece:
    """Query rows `query` against context keys `key`.

    The n-th query sees the keys of the piece up to number first + n, and of these the last `reach`.
    """

    query: slice
    key: slice
    first: int
    reach: int | None

    def hide(self, scores: Tensor) -> Tensor:
        """Set scores [..., queries, keys] of keys that are not seen to −inf, in place."""
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril_(self.first)
        if self.reach is not None:
            seen.triu_(self.first - self.reach + 1)
        return scores.masked_fill_(~seen, float("-inf"))


@dataclass(frozen=True)
class AttentionPlan:
    """Pieces in which query rows meet context keys: each query row is in exactly one, and sees at least one key."""

    pieces: tuple[Piece, ...]


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
    pieces: list[Piece] = []
    for first, count in _runs(documents, rows):
        start = starts[rows[first]]
        for low in range(0, count, BLOCK):
            high = min(low + BLOCK, count)
            begin, end = rows[first] + low, rows[first] + high
            key_low = start if reach is None else max(start, begin - reach + 1)
            bites = reach is not None and end - key_low > reach
            pieces.append(
                Piece(slice(first + low, first + high), slice(key_low, end), begin - key_low, reach if bites else None)
            )
    return AttentionPlan(tuple(pieces))


def _document_starts(documents: Sequence[int]) -> list[int]:
    """Index of the first token of each token's document; padding tokens are documents of one."""
    starts: list[int] = []
    for index, document in enumerate(documents):
        joins = index > 0 and document != -1 and documents[index - 1] == document
        starts.append(starts[-1] if joins else index)
    return starts


def _runs(documents: Sequence[int], rows: Sequence[int]) -> list[tuple[int, int]]:
    """(index into rows, length) of maximal runs of neighbours inside one document."""
    runs: list[tuple[int, int]] = []
    for index, row in enumerate(rows):
        if index > 0 and rows[index - 1] == row - 1 and documents[row - 1] == documents[row] != -1:
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
    """Softmax attention over a plan's context keys and each row's own later keys; float32 inside.

    Args:
        query_RhE: [R, heads, head_dim].
        key_TgE, value_TgE: context [T, kv heads, head_dim]; kv heads divide heads.
        plan: which query meets which key.
        own_keys, own_values: for each later step [R, kv heads, head_dim]: row r meets row r only.

    Returns:
        [R, heads, head_dim] in the query's dtype.
    """
    assert len(own_keys) == len(own_values)
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
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:-1], dtype=q.dtype, device=q.device)
        for piece in plan.pieces:
            scores = piece.hide(_product(q[:, :, piece.query], k[:, piece.key].mT))
            piece_lse = torch.logsumexp(scores, dim=-1)
            weights = scores.sub_(piece_lse[..., None]).exp_()
            out[:, :, piece.query] = _product(weights, v[:, piece.key])
            lse[:, :, piece.query] = piece_lse
        steps = len(own) // 2
        if steps:
            own_scores = [(q * _keys_first(keys)[:, None]).sum(-1) for keys in own[:steps]]
            merged = torch.logsumexp(torch.stack([lse, *own_scores]), dim=0)
            out *= torch.exp(lse - merged)[..., None]
            for score, values in zip(own_scores, own[steps:], strict=True):
                out.addcmul_(_keys_first(values)[:, None], torch.exp(score - merged)[..., None])
            lse = merged
        result = _rows_first(out, query.dtype)
        ctx.save_for_backward(query, key, value, result, lse, *own)
        ctx.plan = plan
        return result

    @staticmethod
    @as_written
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, *own = ctx.saved_tensors
        kv_heads, scale = key.shape[1], query.shape[-1] ** -0.5
        q, k, v = _heads_first(query, kv_heads, scale=scale), _keys_first(key), _keys_first(value)
        grad = _heads_first(upstream[0], kv_heads)
        along = (grad * _heads_first(out, kv_heads)).sum(-1)
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for piece in ctx.plan.pieces:
            rows, keys = piece.query, piece.key
            scores = piece.hide(_product(q[:, :, rows], k[:, keys].mT))
            weights = scores.sub_(lse[:, :, rows, None]).exp_()
            slope = _product(grad[:, :, rows], v[:, keys].mT).sub_(along[:, :, rows, None]).mul_(weights)
            grad_q[:, :, rows] = _product(slope, k[:, keys])
            grad_k[:, keys] += slope.flatten(1, 2).mT @ q[:, :, rows].flatten(1, 2)
            grad_v[:, keys] += weights.flatten(1, 2).mT @ grad[:, :, rows].flatten(1, 2)
        steps = len(own) // 2
        own_grads: list[Tensor] = []
        for own_key, own_value in zip(own[:steps], own[steps:], strict=True):
            k_own, v_own = _keys_first(own_key)[:, None], _keys_first(own_value)[:, None]
            weight = torch.exp((q * k_own).sum(-1) - lse)[..., None]
            slope_own = weight * ((grad * v_own).sum(-1) - along)[..., None]
            grad_q.addcmul_(slope_own, k_own)
            own_grads.append(_rows_first((q * slope_own).sum(1, keepdim=True), own_key.dtype))
            own_grads.append(_rows_first((grad * weight).sum(1, keepdim=True), own_value.dtype))
        return (
            None,
            _rows_first(grad_q.mul_(scale), query.dtype),
            _rows_first(grad_k[:, None], key.dtype),
            _rows_first(grad_v[:, None], value.dtype),
            *own_grads[0::2],
            *own_grads[1::2],
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
