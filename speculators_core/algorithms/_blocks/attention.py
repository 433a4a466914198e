"""Attention of unrolled drafts: causal keys of the context, and one key of its own for each later step.

A query row at step s of an unroll sees (a) the context keys of step 0 up to its own index, in its own document and
window, and (b) the keys that the same row made at steps 1..s. Part (a) is cut into pieces that need no mask, so no
matrix of [queries, keys] is ever stored; part (b) is a handful of dot products. The two meet by their log-sum-exps.
The backward pass gives the kernel the merged output and log-sum-exp, with which its usual formulas are exact for
each piece (as in ring attention, arXiv 2310.01889).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MASKED_BLOCK = 512
"""Query rows of one masked piece where a window cuts a document: bounds the mask to [block, block + window]."""


@dataclass(frozen=True)
class Piece:
    """A run of query rows against a run of keys. causal: square, the n-th query sees keys up to the n-th."""

    query: slice
    key: slice
    causal: bool = False
    visible: Tensor | None = None  # bool [queries, keys]


@dataclass(frozen=True)
class AttentionPlan:
    """Pieces in which query rows meet context keys; every query row meets at least its own key."""

    pieces: tuple[Piece, ...]
    num_queries: int


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
    pieces: list[Piece] = []
    for first, count in _runs(documents, rows):
        begin, end = rows[first], rows[first] + count
        start = begin
        while documents[begin] != -1 and start > 0 and documents[start - 1] == documents[begin]:
            start -= 1
        reach = None if window is None else max(window - shift, 1)
        if reach is not None and end - start > reach:
            pieces += _windowed(first, begin, end, start, reach, document_ids_T.device)
            continue
        if start < begin:
            pieces.append(Piece(slice(first, first + count), slice(start, begin)))
        pieces.append(Piece(slice(first, first + count), slice(begin, end), causal=True))
    return AttentionPlan(tuple(pieces), len(rows))


def _runs(documents: Sequence[int], rows: Sequence[int]) -> list[tuple[int, int]]:
    """(index into rows, length) of maximal runs of neighbours inside one document; padding rows stand alone."""
    runs: list[tuple[int, int]] = []
    for index, row in enumerate(rows):
        joins = index > 0 and rows[index - 1] == row - 1 and documents[row - 1] == documents[row] != -1
        if joins:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((index, 1))
    return runs


def _windowed(first: int, begin: int, end: int, start: int, reach: int, device: torch.device) -> list[Piece]:
    pieces = []
    for low in range(begin, end, MASKED_BLOCK):
        high = min(low + MASKED_BLOCK, end)
        key_low = max(start, low - reach + 1)
        distance = torch.arange(low, high, device=device)[:, None] - torch.arange(key_low, high, device=device)
        visible = (distance >= 0) & (distance < reach)
        pieces.append(Piece(slice(first + low - begin, first + high - begin), slice(key_low, high), visible=visible))
    return pieces


def attend(
    query_RhE: Tensor,
    key_TgE: Tensor,
    value_TgE: Tensor,
    plan: AttentionPlan,
    own_keys: Sequence[Tensor] = (),
    own_values: Sequence[Tensor] = (),
) -> Tensor:
    """Softmax attention over a plan's context keys and each row's own later keys.

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
    @staticmethod
    def forward(ctx: Any, plan: AttentionPlan, query: Tensor, key: Tensor, value: Tensor, *own: Tensor) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        wide = torch.promote_types(query.dtype, torch.float32)
        out, lse = _context(plan, query, key, value)
        steps = len(own) // 2
        if steps:
            scores = [_own_scores(query, keys, groups) for keys in own[:steps]]
            merged = torch.logsumexp(torch.stack([lse, *scores]), dim=0)
            mixed = out.to(wide) * torch.exp(lse - merged)[..., None]
            for score, values in zip(scores, own[steps:], strict=True):
                mixed += _spread(values, groups).to(wide) * torch.exp(score - merged)[..., None]
            out, lse = mixed.to(query.dtype), merged
        ctx.save_for_backward(query, key, value, out, lse, *own)
        ctx.plan = plan
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, *own = ctx.saved_tensors
        grad_out = upstream[0].to(out.dtype).contiguous()
        groups = query.shape[1] // key.shape[1]
        wide = torch.promote_types(query.dtype, torch.float32)
        grad_query = torch.zeros_like(query, dtype=wide)
        grad_key = torch.zeros_like(key, dtype=wide)
        grad_value = torch.zeros_like(value, dtype=wide)
        for piece in ctx.plan.pieces:
            parts = _piece_backward(piece, grad_out, query, key, value, out, lse)
            grad_query[piece.query] += parts[0]
            grad_key[piece.key] += parts[1]
            grad_value[piece.key] += parts[2]
        steps = len(own) // 2
        own_grads: list[Tensor] = []
        if steps:
            scale = query.shape[-1] ** -0.5
            grad_wide, query_wide = grad_out.to(wide), query.to(wide)
            along = torch.linalg.vecdot(grad_wide, out.to(wide))
            key_grads, value_grads = [], []
            for keys, values in zip(own[:steps], own[steps:], strict=True):
                weight = torch.exp(_own_scores(query, keys, groups) - lse)
                value_grads.append(_gather(grad_wide * weight[..., None], groups).to(values.dtype))
                slope = weight * (torch.linalg.vecdot(grad_wide, _spread(values, groups).to(wide)) - along) * scale
                grad_query += slope[..., None] * _spread(keys, groups)
                key_grads.append(_gather(query_wide * slope[..., None], groups).to(keys.dtype))
            own_grads = key_grads + value_grads
        return (
            None,
            grad_query.to(query.dtype),
            grad_key.to(key.dtype),
            grad_value.to(value.dtype),
            *own_grads,
        )


def _spread(x_RgE: Tensor, groups: int) -> Tensor:
    """[R, kv heads, E] to [R, heads, E]."""
    return x_RgE if groups == 1 else x_RgE.repeat_interleave(groups, dim=1)


def _gather(x_RhE: Tensor, groups: int) -> Tensor:
    """Sum the query heads of each kv head: the transpose of `_spread`."""
    return x_RhE if groups == 1 else x_RhE.view(x_RhE.shape[0], -1, groups, x_RhE.shape[-1]).sum(2)


def _own_scores(query: Tensor, keys: Tensor, groups: int) -> Tensor:
    wide = torch.promote_types(query.dtype, torch.float32)
    products: Tensor = torch.linalg.vecdot(query.to(wide), _spread(keys, groups).to(wide))
    return products * query.shape[-1] ** -0.5


def _context(plan: AttentionPlan, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Output [R, heads, E] and log-sum-exp [R, heads] over all pieces of the plan."""
    wide = torch.promote_types(query.dtype, torch.float32)
    out = torch.empty_like(query)
    lse = torch.full(query.shape[:2], float("-inf"), dtype=wide, device=query.device)
    for piece in plan.pieces:
        part, part_lse = _piece_forward(piece, query[piece.query], key[piece.key], value[piece.key])
        old_lse = lse[piece.query]
        if piece.causal or piece.visible is not None:
            if torch.isinf(old_lse).all():
                out[piece.query], lse[piece.query] = part, part_lse
                continue
            merged = torch.logaddexp(old_lse, part_lse)
            mixed = out[piece.query].to(wide) * torch.exp(old_lse - merged)[..., None]
            mixed += part.to(wide) * torch.exp(part_lse - merged)[..., None]
            out[piece.query], lse[piece.query] = mixed.to(out.dtype), merged
        else:
            out[piece.query], lse[piece.query] = part, part_lse
    return out, lse


def _piece_forward(piece: Piece, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    if query.device.type == "cpu":
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, piece.causal, attn_mask=_additive(piece, query.dtype)
        )
        return out[0].transpose(0, 1), lse[0].transpose(0, 1)
    groups = query.shape[1] // key.shape[1]
    scores = _scores(piece, query, key, groups)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse[..., None])
    out = torch.einsum("hrt,the->rhe", weights, _spread(value, groups).to(weights.dtype))
    return out.to(query.dtype), lse.transpose(0, 1)


def _piece_backward(
    piece: Piece, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    grad_out, query, out, lse = (x[piece.query] for x in (grad_out, query, out, lse))
    key, value = key[piece.key], value[piece.key]
    if query.device.type == "cpu":
        g, q, k, v, o = (x.transpose(0, 1)[None] for x in (grad_out, query, key, value, out))
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            g, q, k, v, o, lse.transpose(0, 1)[None], 0.0, piece.causal, attn_mask=_additive(piece, query.dtype)
        )
        grad_query, grad_key, grad_value = (x[0].transpose(0, 1) for x in grads)
        return grad_query, grad_key, grad_value
    groups = query.shape[1] // key.shape[1]
    scale = query.shape[-1] ** -0.5
    weights = torch.exp(_scores(piece, query, key, groups) - lse.transpose(0, 1)[..., None])
    wide = weights.dtype
    grad_wide = grad_out.to(wide)
    along = torch.linalg.vecdot(grad_wide, out.to(wide)).transpose(0, 1)[..., None]
    slope = weights * (torch.einsum("rhe,the->hrt", grad_wide, _spread(value, groups).to(wide)) - along) * scale
    return (
        torch.einsum("hrt,the->rhe", slope, _spread(key, groups).to(wide)),
        _gather(torch.einsum("hrt,rhe->the", slope, query.to(wide)), groups),
        _gather(torch.einsum("hrt,rhe->the", weights, grad_wide), groups),
    )


def _scores(piece: Piece, query: Tensor, key: Tensor, groups: int) -> Tensor:
    wide = torch.promote_types(query.dtype, torch.float32)
    scores: Tensor = torch.einsum("rhe,the->hrt", query.to(wide), _spread(key, groups).to(wide))
    scores = scores * query.shape[-1] ** -0.5
    visible = piece.visible
    if piece.causal:
        visible = torch.ones(scores.shape[1:], dtype=torch.bool, device=query.device).tril()
    return scores if visible is None else scores.masked_fill(~visible, float("-inf"))


def _additive(piece: Piece, dtype: torch.dtype) -> Tensor | None:
    if piece.visible is None:
        return None
    return torch.zeros(piece.visible.shape, dtype=dtype).masked_fill_(~piece.visible, float("-inf"))[None, None]
