"""What vLLM's proposer does with a draft, written as an ordinary decoder run over one growing sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from speculators_core.algorithms._blocks.feature_draft import FeatureDraft, FirstLayer
from speculators_core.algorithms._blocks.layers import DecoderLayer
from speculators_core.algorithms._blocks.rotary import rotate
from speculators_core.algorithms.eagle3.model import Eagle3Draft
from speculators_core.algorithms.peagle.model import PEagleDraft
from speculators_core.types import Aligned


def decode(model: FeatureDraft, tokens: Tensor, features: Tensor, positions: Tensor) -> Tensor:
    """States [N, H] before the final norm of an ordinary causal pass."""
    rotation, hidden = model.rotary(positions), features
    count = tokens.numel()
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, DecoderLayer)
        if isinstance(layer, FirstLayer):
            embeds = layer.input_layernorm(model.embed_tokens.weight[tokens].to(hidden.dtype))
            normed = layer.hidden_norm(hidden)
            residual = normed if model.config.norm_before_residual else hidden
            x = torch.cat([embeds, normed], dim=-1)
        else:
            residual, x = hidden, layer.input_layernorm(hidden)
        attn = layer.self_attn
        q, k, v = (p(x).unflatten(-1, (-1, attn.head_dim)) for p in (attn.q_proj, attn.k_proj, attn.v_proj))
        if attn.q_norm is not None and attn.k_norm is not None:
            q, k = attn.q_norm(q), attn.k_norm(k)
        q, k = rotate(q, rotation), rotate(k, rotation)
        groups = q.shape[1] // k.shape[1]
        distance = torch.arange(count)[:, None] - torch.arange(count)
        window = model.geometry.window(index)
        seen = (distance >= 0) & (distance < (window or count))
        out = functional.scaled_dot_product_attention(
            q.transpose(0, 1),
            k.repeat_interleave(groups, 1).transpose(0, 1),
            v.repeat_interleave(groups, 1).transpose(0, 1),
            attn_mask=seen,
        )
        hidden = residual + attn.o_proj(out.transpose(0, 1).flatten(1))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return hidden


@torch.no_grad()
def propose(model: Eagle3Draft, aligned: Aligned, point: int, k: int) -> list[int]:
    """k greedy proposals (verifier ids) after token `point` of the aligned row, fed with its own tokens and states."""
    tokens = aligned.input_ids[: point + 1]
    features = model.join(aligned.aux_TAH[: point + 1])
    positions = aligned.position_ids[: point + 1]
    proposals: list[int] = []
    for _ in range(k):
        state = decode(model, tokens, features, positions)[-1:]
        normed = model.norm(state)
        token = (normed @ model.lm_head.weight.to(normed.dtype).T).argmax(-1)
        if model.d2t is not None:
            token = token + model.d2t[token]
        proposals.append(int(token))
        recycled = normed if model.config.norm_output else state
        tokens, features = torch.cat([tokens, token]), torch.cat([features, recycled])
        positions = torch.cat([positions, positions[-1:] + 1])
    return proposals


@torch.no_grad()
def propose_in_parallel(model: PEagleDraft, aligned: Aligned, point: int, k: int) -> list[int]:
    """The same by one pass: k − 1 masked rows behind the row of token `point`."""
    tokens = torch.cat([aligned.input_ids[: point + 1], torch.full((k - 1,), model.mask_token_id)])
    features = model.join(torch.cat([aligned.aux_TAH[: point + 1], model.mask_hidden[0].expand(k - 1, -1)]))
    positions = int(aligned.position_ids[0]) + torch.arange(point + k)
    normed = model.norm(decode(model, tokens, features, positions)[-k:])
    proposals = (normed @ model.lm_head.weight.to(normed.dtype).T).argmax(-1)
    if model.d2t is not None:
        proposals = proposals + model.d2t[proposals]
    return [int(token) for token in proposals]


def serve(
    model: FeatureDraft, aligned: Aligned, k: int, propose: Callable[[Any, Aligned, int, int], list[int]] = propose
) -> list[int]:
    """Accepted drafts at each drafting point of each reply in the row, by trying every proposal."""
    tokens, mask = aligned.input_ids.tolist(), aligned.loss_mask.tolist()
    accepted: list[int] = []
    point = 0
    while point + 1 < len(tokens):
        if not (mask[point] and mask[point + 1]):
            point += 1
            continue
        count = 0
        for offset, token in enumerate(propose(model, aligned, point, k), start=1):
            at = point + offset
            if at >= len(tokens) or not mask[at] or tokens[at] != token:
                break
            count += 1
        accepted.append(count)
        point += count + 1
    return accepted
