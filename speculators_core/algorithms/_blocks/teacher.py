"""The verifier's side of training: from its last hidden state to the logits that it would have sampled from."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

NormConvention = Literal["plain", "one_plus"]


class Teacher(nn.Module):
    """Frozen final norm and vocabulary head of the verifier, restricted to the draft's vocabulary.

    Args:
        norm_H: weight of the final norm.
        head_DH: head rows that the draft can propose; kept in their own dtype.
        eps: of the norm.
        convention: `one_plus` for families whose norm multiplies by 1 + weight.
        softcap: logits become cap · tanh(logits / cap), or None.
        scale: factor on the logits, before the cap.
    """

    def __init__(
        self,
        norm_H: Tensor,
        head_DH: Tensor,
        *,
        eps: float,
        convention: NormConvention = "plain",
        softcap: float | None = None,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.norm = nn.Parameter(norm_H, requires_grad=False)
        self.head = nn.Parameter(head_DH, requires_grad=False)
        self.eps, self.convention, self.softcap, self.scale = eps, convention, softcap, scale

    @property
    def norm_weight_H(self) -> Tensor:
        """What the final norm multiplies by."""
        return self.norm + 1.0 if self.convention == "one_plus" else self.norm

    @torch.no_grad()
    def normed(self, last_NH: Tensor, compute: torch.dtype) -> Tensor:
        """What the verifier's final norm makes of residual streams, in at least float32."""
        wide = last_NH.to(torch.promote_types(compute, torch.float32))
        unit = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return unit * self.norm_weight_H.to(wide.dtype)

    @torch.no_grad()
    def logits(self, last_NH: Tensor, compute: torch.dtype) -> Tensor:
        """Logits float32 [N, D] of residual streams before the final norm; the product is formed in `compute`."""
        normed = self.normed(last_NH, compute)
        with torch.autocast(last_NH.device.type, enabled=False):
            logits = (normed.to(compute) @ self.head.to(compute).T).to(normed.dtype)
        if self.scale != 1.0:
            logits *= self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits
