"""Root-mean-square normalisation with its gradient in closed form: float32 inside, the input's dtype outside."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from speculators_core.algorithms._blocks.precision import as_written


class _RmsNorm(torch.autograd.Function):
    """One pass instead of the six small operations that autograd would record and keep."""

    @staticmethod
    @as_written
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        rstd = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, rstd)
        normed: Tensor = (wide * rstd).mul_(weight)
        return normed.to(x.dtype)

    @staticmethod
    @as_written
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, rstd = ctx.saved_tensors
        unit = x.to(rstd.dtype) * rstd
        product = upstream[0] * unit
        weight_grad = product.flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, weight_grad, None
        along = (product @ weight.to(rstd.dtype))[..., None].div_(-x.shape[-1])
        grad = torch.mul(upstream[0], weight, out=product)
        return grad.addcmul_(unit, along).mul_(rstd).to(x.dtype), weight_grad, None


class RMSNorm(nn.Module):
    """x · rsqrt(mean x² + eps) · weight over the last dimension (arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise; returns x's dtype."""
        result: Tensor = _RmsNorm.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return result
