"""What vLLM's proposer does with a draft of anchored blocks, by ordinary attention over one growing sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from speculators_core.algorithms._blocks.block_draft import BlockDraft, BlockLayer
from speculators_core.algorithms._blocks.geometry import FULL
from speculators_core.algorithms._blocks.rotary import rotate
from speculators_core.types import Aligned
from tests.unit.speculators_core.algorithms.tiny import VOCAB


def fill_in(model: BlockDraft, aligned: Aligned, anchor: int, slots: int) -> Tensor:
    """States [B, H] of one block, given the features before its anchor, by ordinary attention."""
    features = model.hidden_norm(model.fc(aligned.aux_TAH[:anchor]))
    positions = torch.arange(anchor + slots)
    tokens = torch.tensor([int(aligned.input_ids[anchor])] + [model.mask_token_id] * (slots - 1))
    hidden = model.embed_tokens.weight[tokens].to(features.dtype)
    if model.mask_embedding is not None:
        hidden = torch.where((tokens == model.mask_token_id)[:, None], model.mask_embedding, hidden)
    rotation = model.rotary(positions)
    own_rotation = (rotation[0][anchor:], rotation[1][anchor:])
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, BlockLayer)
        attn, window = layer.self_attn, model.geometry.window(index)
        assert attn.q_norm is not None and attn.k_norm is not None
        x = layer.input_layernorm(hidden)
        rows = torch.cat([features, x])  # context rows are not normed again
        q = rotate(attn.q_norm(attn.q_proj(x).unflatten(-1, (-1, attn.head_dim))), own_rotation)
        k = rotate(attn.k_norm(attn.k_proj(rows).unflatten(-1, (-1, attn.head_dim))), rotation)
        v = attn.v_proj(rows).unflatten(-1, (-1, attn.head_dim))
        distance = positions[anchor:, None] - positions
        seen = distance.abs() < window if window is not None else torch.ones_like(distance, dtype=torch.bool)
        if model.geometry.layer_types[index] != FULL and not model.knobs.sliding_window_non_causal:
            seen &= distance >= 0
        groups = q.shape[1] // k.shape[1]
        out = functional.scaled_dot_product_attention(
            q.transpose(0, 1),
            k.repeat_interleave(groups, 1).transpose(0, 1),
            v.repeat_interleave(groups, 1).transpose(0, 1),
            attn_mask=seen,
        )
        hidden = layer.finish(attn.o_proj(out.transpose(0, 1).flatten(1)), hidden)
    normed: Tensor = model.norm(hidden)
    return normed


def served(aligned: Aligned, k: int, propose: Callable[[int], list[int]]) -> list[int]:
    """Accepted drafts at each drafting point of each reply in the row, by trying every proposal."""
    tokens, mask = aligned.input_ids.tolist(), aligned.loss_mask.tolist()
    accepted: list[int] = []
    point = 0
    while point + 1 < len(tokens):
        if not (mask[point] and mask[point + 1]):
            point += 1
            continue
        count = 0
        for offset, token in enumerate(propose(point), start=1):
            at = point + offset
            if at >= len(tokens) or not mask[at] or tokens[at] != token:
                break
            count += 1
        assert count <= k
        accepted.append(count)
        point += count + 1
    return accepted


def replies_of(aligned: Aligned, propose: Callable[[Aligned, int], list[int]]) -> Tensor:
    """Token ids whose replies are what the draft itself would say, with slips: some of its proposals are accepted."""
    ids, mask = aligned.input_ids.clone(), aligned.loss_mask
    generator = torch.Generator().manual_seed(0)
    at = 0
    while at + 1 < ids.numel():
        if not (mask[at] and mask[at + 1]):
            at += 1
            continue
        kept = int(torch.randint(0, 4, (), generator=generator))
        for offset, token in enumerate(propose(replace(aligned, input_ids=ids), at)[:kept], start=1):
            if at + offset >= ids.numel() or not mask[at + offset]:
                break
            ids[at + offset] = token
        at += kept + 1
        if at < ids.numel() and mask[at]:
            ids[at] = int(torch.randint(VOCAB - 1, (), generator=generator))
    return ids
