"""The decoder layer of unrolled drafts."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.nn import functional

from speculators_core.algorithms._blocks.attention import AttentionPlan, attend
from speculators_core.algorithms._blocks.geometry import LayerGeometry
from speculators_core.algorithms._blocks.norms import RMSNorm
from speculators_core.algorithms._blocks.rotary import Rotation, rotate


@dataclass
class LayerCache:
    """Keys and values of one layer during an unroll: the context's from step 0, then one set a step."""

    key_TgE: Tensor | None = None
    value_TgE: Tensor | None = None
    own_keys: list[Tensor] = field(default_factory=list)
    own_values: list[Tensor] = field(default_factory=list)

    def take(self, rows: Tensor) -> None:
        """Keep the own keys of some rows only."""
        self.own_keys = [keys[rows] for keys in self.own_keys]
        self.own_values = [values[rows] for values in self.own_values]


class SelfAttention(nn.Module):
    """Grouped-query attention; `qwen3` style norms each query and key head before it is turned."""

    def __init__(self, geometry: LayerGeometry, input_size: int) -> None:
        super().__init__()
        head_dim = geometry.head_dim
        self.head_dim = head_dim
        self.q_proj = nn.Linear(input_size, geometry.num_attention_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(input_size, geometry.num_key_value_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(input_size, geometry.num_key_value_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(geometry.num_attention_heads * head_dim, geometry.hidden_size, bias=False)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if geometry.style == "qwen3":
            self.q_norm = RMSNorm(head_dim, geometry.rms_norm_eps)
            self.k_norm = RMSNorm(head_dim, geometry.rms_norm_eps)

    def heads(self, x_NC: Tensor, query_rows: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [R, heads, head_dim] of some rows (None: all), keys and values [N, kv heads, head_dim], unturned."""
        key = self.k_proj(x_NC).unflatten(-1, (-1, self.head_dim))
        value = self.v_proj(x_NC).unflatten(-1, (-1, self.head_dim))
        query = self.q_proj(x_NC if query_rows is None else x_NC[query_rows]).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        return query, key, value

    def forward(
        self,
        x_NC: Tensor,
        query_rows: Tensor | None,
        key_rotation: Rotation,
        query_rotation: Rotation,
        plan: AttentionPlan,
        cache: LayerCache,
    ) -> Tensor:
        """Attend with rows of x; the first call fills the cache's context, each later one adds its own keys.

        Args:
            x_NC: normalised inputs [N, C]; all tokens at step 0, the query rows later.
            query_rows: rows of x that ask, None for all.
            key_rotation, query_rotation: for x and for the rows that ask.
            plan: pieces of the context that the rows meet.
            cache: of this layer.

        Returns:
            [R, H], output projection applied.
        """
        query, key, value = self.heads(x_NC, query_rows)
        query, key = rotate(query, query_rotation), rotate(key, key_rotation)
        if cache.key_TgE is None or cache.value_TgE is None:
            cache.key_TgE, cache.value_TgE = key, value
        else:
            cache.own_keys.append(key)
            cache.own_values.append(value)
        out_RhE = attend(query, cache.key_TgE, cache.value_TgE, plan, cache.own_keys, cache.own_values)
        result: Tensor = self.o_proj(out_RhE.flatten(1))
        return result


class GatedMLP(nn.Module):
    """down(silu(gate(x)) · up(x)) (arXiv 2002.05202)."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[N, H] to [N, H]."""
        result: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class DecoderLayer(nn.Module):
    """Attention and feed-forward parts; what is normed and added before attention is the caller's choice."""

    def __init__(self, geometry: LayerGeometry, input_size: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(geometry.hidden_size, geometry.rms_norm_eps)
        self.self_attn = SelfAttention(geometry, input_size)
        self.post_attention_layernorm = RMSNorm(geometry.hidden_size, geometry.rms_norm_eps)
        self.mlp = GatedMLP(geometry.hidden_size, geometry.intermediate_size)

    def finish(self, attended_RH: Tensor, residual_RH: Tensor) -> Tensor:
        """Residual sum, norm, feed-forward part, residual sum."""
        hidden_RH = residual_RH + attended_RH
        result: Tensor = hidden_RH + self.mlp(self.post_attention_layernorm(hidden_RH))
        return result
