"""Rotary position embedding (arXiv 2104.09864) in the half-split layout of Llama and Qwen."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from speculators_core.algorithms._blocks.geometry import LayerGeometry

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, float32 [N, 1, head_dim / 2]."""


class Rotary(nn.Module):
    """Angles for positions; any scaling that transformers knows, plain rotation without loading it."""

    inverse_frequencies: Tensor

    def __init__(self, geometry: LayerGeometry) -> None:
        super().__init__()
        parameters = geometry.rope_parameters
        kind = parameters.get("rope_type", "default")
        if kind == "default":
            exponents = torch.arange(0, geometry.head_dim, 2, dtype=torch.int64).float() / geometry.head_dim
            frequencies, self.scale = 1.0 / float(parameters["rope_theta"]) ** exponents, 1.0
        else:
            from transformers import AutoConfig
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            config = AutoConfig.for_model(**geometry.to_transformers())
            frequencies, self.scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        self.register_buffer("inverse_frequencies", frequencies, persistent=False)

    def forward(self, positions_N: Tensor) -> Rotation:
        """Cosines and sines at int64 positions [N]."""
        angles = positions_N.to(torch.float32)[:, None] * self.inverse_frequencies.float()
        return (angles.cos() * self.scale)[:, None], (angles.sin() * self.scale)[:, None]


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(upstream[0], cos, -sin), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def rotate(x_NhE: Tensor, rotation: Rotation) -> Tensor:
    """Turn heads [N, heads, head_dim] by their positions' angles; float32 inside, x's dtype outside."""
    result: Tensor = _Rotate.apply(x_NhE, *rotation)  # type: ignore[no-untyped-call]
    return result
