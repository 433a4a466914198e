"""A short causal convolution along the slots of a block whose kernel each row makes for itself."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class DynamicConv(nn.Module):
    """y[t, c] = Σ_{τ ≤ t} (base[τ, c] + δ[t, τ, group of c]) · x[t − τ, c], before a sub-layer and again behind it.

    The kernels of both sides are projections of the row that goes in. It starts as the identity.

    Args:
        hidden_size: H channels.
        taps: slots that a kernel reaches, its own included.
        group_size: neighbouring channels that share a row's δ.
    """

    def __init__(self, hidden_size: int, taps: int, group_size: int) -> None:
        super().__init__()
        self.taps, self.groups, self.group_size = taps, hidden_size // group_size, group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * taps * self.groups, bias=False)
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """The identity on both sides."""
        self.base_kernel.zero_()
        self.base_kernel[:, 0] = 1.0
        self.kernel_projection.weight.zero_()

    def before(self, x_MBH: Tensor) -> tuple[Tensor, Tensor]:
        """The rows for the sub-layer, and the kernels [M, B, taps, groups] for what comes out of it."""
        kernels: Tensor = self.kernel_projection(x_MBH)
        sides = kernels.view(*x_MBH.shape[:2], 2, self.taps, self.groups)
        return self._convolve(x_MBH, sides[:, :, 0], 0), sides[:, :, 1]

    def after(self, x_MBH: Tensor, kernels: Tensor) -> Tensor:
        """The rows that came out of the sub-layer, convolved."""
        return self._convolve(x_MBH, kernels, 1)

    def _convolve(self, x_MBH: Tensor, kernels: Tensor, side: int) -> Tensor:
        grouped = x_MBH.view(*x_MBH.shape[:2], self.groups, self.group_size)
        base = self.base_kernel[side].view(self.taps, self.groups, self.group_size)
        out = (base[0] + kernels[:, :, 0, :, None]) * grouped
        for tap in range(1, min(self.taps, grouped.shape[1])):
            shifted = functional.pad(grouped[:, : grouped.shape[1] - tap], (0, 0, 0, 0, tap, 0))
            out = out + (base[tap] + kernels[:, :, tap, :, None]) * shifted
        return out.to(x_MBH.dtype).flatten(2)
