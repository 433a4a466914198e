"""A verifier's native multi-token head, unrolled.

The decoder layer is transformers' own of the verifier's family; only its attention is ours, handed in through the
library's registry of attention functions, so that a step sees the context of step 0 and the keys of its own row, as a
served head does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from speculators_core.algorithms._blocks.attention import AttentionPlan, attend
from speculators_core.algorithms._blocks.layers import LayerCache
from speculators_core.algorithms._blocks.teacher import Teacher
from speculators_core.algorithms._blocks.unrolled import Drafting, GoOn
from speculators_core.algorithms.mtp.config import MTPConfig
from speculators_core.algorithms.mtp.families import Family

ATTENTION = "draftsmith_unrolled"
"""Name of our attention in transformers' registry."""


def unrolled_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    plan: AttentionPlan,
    cache: LayerCache,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface over `attend`: query [1, heads, N, E], key and value [1, kv heads, N, E].

    The first call of a cache fills its context; each later one adds the keys of its own rows. Values may be narrower
    than keys (latent attention).
    """
    query_NhE, key_NgE, value_NgF = (heads[0].transpose(0, 1) for heads in (query, key, value))
    size, narrow = query_NhE.shape[-1], value_NgF.shape[-1]
    if scaling is not None and scaling != size**-0.5:
        query_NhE = query_NhE * (scaling * size**0.5)
    if narrow < size:
        value_NgF = functional.pad(value_NgF, (0, size - narrow))
    if cache.key_TgE is None or cache.value_TgE is None:
        cache.key_TgE, cache.value_TgE = key_NgE, value_NgF
    else:
        cache.own_keys.append(key_NgE)
        cache.own_values.append(value_NgF)
    out_NhE = attend(query_NhE, cache.key_TgE, cache.value_TgE, plan, cache.own_keys, cache.own_values)
    return out_NhE[None, ..., :narrow], None


class MTPHead(nn.Module):
    """Two norms, their projection, one decoder layer and a last norm; embedding and vocabulary head are borrowed.

    Args:
        config: the knobs.
        family: where the tensors come from, and how serving runs them.
        layer_config: transformers' configuration of the decoder layer.
    """

    def __init__(self, config: MTPConfig, family: Family, layer_config: Any) -> None:
        super().__init__()
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, unrolled_attention)
        layer_config._attn_implementation = ATTENTION
        hidden, eps = layer_config.hidden_size, layer_config.rms_norm_eps
        norm: Any = family.part("RMSNorm")
        layer: Any = family.part("DecoderLayer")
        rotary: Any = family.part(family.rotary)
        self.config, self.family, self.layer_config = config, family, layer_config
        self.verifier_architectures: tuple[str, ...] = ()
        self.text_config: dict[str, Any] = {}
        self.depth = int(layer_config.num_hidden_layers)
        self.embed_tokens = nn.Embedding(layer_config.vocab_size, hidden, device="meta")
        self.token_layernorm = norm(hidden, eps=eps)
        self.hidden_layernorm = norm(hidden, eps=eps)
        self.input_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.layer = layer(layer_config, attending_layer(layer_config))
        self.final_layernorm = norm(hidden, eps=eps)
        self.lm_head = nn.Linear(hidden, layer_config.vocab_size, bias=False, device="meta")
        self.rotary = rotary(layer_config)
        self.teacher: Teacher | None = None

    def borrow(self, embed_VH: Tensor, head_VH: Tensor) -> None:
        """Put the verifier's embedding and vocabulary head in place, frozen and in their own dtype."""
        self.embed_tokens.weight = nn.Parameter(embed_VH, requires_grad=False)
        self.lm_head.weight = nn.Parameter(head_VH, requires_grad=False)

    def head_tensors(self) -> dict[str, Tensor]:
        """What the head itself holds, by name: all that training may change, and the buffers of its router."""
        borrowed = ("embed_tokens.", "lm_head.", "teacher.", "rotary.")
        return {name: value for name, value in self.state_dict().items() if not name.startswith(borrowed)}

    def forward(
        self,
        input_ids_T: Tensor,
        position_ids_T: Tensor,
        state_TH: Tensor,
        drafting: Drafting,
        steps: int,
        go_on: GoOn | None = None,
    ) -> list[Tensor]:
        """Unroll from every drafting row at once, fed with the row's real tokens, or with what `go_on` says.

        Step s of row j reads token j + s (0 past the end) at position + s, the state that step s − 1 of the same row
        left, the context's keys up to j, and its own keys of steps 1..s.

        Args:
            state_TH: the verifier's state as serving feeds it, see `fed`.

        Returns:
            for each step [R, H]: normalised hidden states, ready for the vocabulary head.
        """
        rows_R = drafting.rows_R
        cache = LayerCache()
        following_TP = functional.pad(input_ids_T, (0, steps))
        outputs: list[Tensor] = []
        for step in range(steps):
            first = step == 0
            if first:
                tokens = input_ids_T
            else:
                tokens = following_TP[rows_R + step] if go_on is None else go_on(step - 1, outputs[-1])
            positions = position_ids_T if first else position_ids_T[rows_R] + step
            out_NH = self.run(tokens, positions, state_TH, drafting.plan(first, None, 0), cache)
            out_RH = out_NH[rows_R] if first else out_NH
            normed_RH = self.final_layernorm(out_RH)
            outputs.append(normed_RH)
            state_TH = normed_RH if self.family.recycles_normed else out_RH
        return outputs

    def anew(
        self, tokens_KN: Sequence[Tensor], positions_N: Tensor, state_NH: Tensor, plan: AttentionPlan
    ) -> list[Tensor]:
        """speculators 0.9's steps: each attends to the keys of its own step alone, at the positions of step 0."""
        outputs: list[Tensor] = []
        for tokens_N in tokens_KN:
            state_NH = self.final_layernorm(self.run(tokens_N, positions_N, state_NH, plan, LayerCache()))
            outputs.append(state_NH)
        return outputs

    def run(
        self, tokens_N: Tensor, positions_N: Tensor, state_NH: Tensor, plan: AttentionPlan, cache: LayerCache
    ) -> Tensor:
        """One step of some rows: states [N, H] before the last norm."""
        embeds_NH = functional.embedding(tokens_N, self.embed_tokens.weight).to(state_NH.dtype)
        if self.family.blanks_first and not self.config.compat:
            embeds_NH = torch.where((positions_N == 0)[:, None], 0.0, embeds_NH)
        parts = (self.token_layernorm(embeds_NH), self.hidden_layernorm(state_NH))
        joined_NH = self.input_proj(torch.cat(parts[::-1] if self.family.hidden_first else parts, dim=-1))
        rotation = self.rotary(joined_NH[None], positions_N[None])
        result: Tensor = self.layer(
            joined_NH[None], position_embeddings=rotation, attention_mask=None, plan=plan, cache=cache
        )
        return result[0]

    def fed(self, last_TH: Tensor) -> Tensor:
        """The verifier's residual stream [T, H] as serving hands it to the head."""
        if not self.family.fed_normed or self.config.compat:
            return last_TH
        assert self.teacher is not None, "the head was built without its verifier"
        return self.teacher.normed(last_TH, last_TH.dtype).to(last_TH.dtype)


def attending_layer(layer_config: Any) -> int:
    """Index of the last layer with full attention: a head is built like it."""
    kinds = getattr(layer_config, "layer_types", None) or ["full_attention"] * layer_config.num_hidden_layers
    return int(max(index for index, kind in enumerate(kinds) if kind == "full_attention"))
