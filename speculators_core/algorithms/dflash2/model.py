"""The DFlash2 draft: the backbone of blocks with convolutions along them, and a selector on top."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from speculators_core.algorithms._blocks.block_draft import BlockDraft, BlockLayer, Context, attend_context
from speculators_core.algorithms._blocks.dynamic_conv import DynamicConv
from speculators_core.algorithms._blocks.geometry import LayerGeometry
from speculators_core.algorithms._blocks.selector import CandidateSelector

if TYPE_CHECKING:
    from speculators_core.algorithms.dflash2.config import DFlash2Config


class ConvolvedLayer(BlockLayer):
    """A block layer whose attention and feed-forward part each sit between two convolutions along the block."""

    def __init__(self, geometry: LayerGeometry, taps: int, group_size: int) -> None:
        super().__init__(geometry)
        self.attention_conv = DynamicConv(geometry.hidden_size, taps, group_size)
        self.mlp_conv = DynamicConv(geometry.hidden_size, taps, group_size)

    def forward(self, hidden_MBH: Tensor, context: Context, skip: int) -> Tensor:
        """[M, B, H] to [M, B − skip, H]; convolutions read the slots before, so none ends earlier than here."""
        x_MBH, kernels = self.attention_conv.before(self.input_layernorm(hidden_MBH))
        hidden_MBH = hidden_MBH + self.attention_conv.after(attend_context(self.self_attn, x_MBH, context, 0), kernels)
        x_MBH, kernels = self.mlp_conv.before(self.post_attention_layernorm(hidden_MBH))
        return (hidden_MBH + self.mlp_conv.after(self.mlp(x_MBH), kernels))[:, skip:]


class DFlash2Draft(BlockDraft):
    """See `BlockDraft`; its vocabulary is the verifier's own.

    Args:
        config: the knobs.
        geometry, num_aux, mask_token_id, trains_mask: of the backbone.
    """

    def __init__(
        self,
        config: DFlash2Config,
        geometry: LayerGeometry,
        num_aux: int,
        *,
        mask_token_id: int,
        trains_mask: bool = False,
    ) -> None:
        self._taps = config.conv_kernel_size, config.conv_group_size
        # vLLM scales no logits of this method
        super().__init__(config, geometry, num_aux, None, mask_token_id=mask_token_id, trains_mask=trains_mask)
        self.config = config
        self.candidate_selector = CandidateSelector(geometry.vocab_size, geometry.hidden_size, config.selector_rank)

    def make_layer(self) -> nn.Module:
        """A layer with convolutions."""
        return ConvolvedLayer(self.geometry, *self._taps)

    def draw_heads(self, generator: torch.Generator) -> None:
        """Fresh codebooks; convolutions that change nothing yet."""
        for module in self.modules():
            if isinstance(module, DynamicConv):
                module.reset()
        self.candidate_selector.draw(self.geometry.initializer_range, generator)
