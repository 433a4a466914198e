"""The backbone of drafts that fill in blocks: an anchor token and masks behind it, all drafted in one pass.

Every layer reads the verifier's features of the tokens before the anchor as keys and values, made with the layer's own
projections; only the rows of the blocks are carried on. Parameter names are those of the served file.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from speculators_core.algorithms._blocks.block_attention import BlockPlan, attend_blocks, plan_blocks
from speculators_core.algorithms._blocks.block_knobs import BlockKnobs
from speculators_core.algorithms._blocks.geometry import SLIDING, LayerGeometry
from speculators_core.algorithms._blocks.layers import DecoderLayer, SelfAttention
from speculators_core.algorithms._blocks.norms import RMSNorm
from speculators_core.algorithms._blocks.rotary import Rotary, Rotation, rotate
from speculators_core.algorithms._blocks.teacher import Teacher
from speculators_core.algorithms._blocks.vocabulary import ReducedVocabulary


@dataclass(frozen=True)
class Blocks:
    """Where blocks stand in a packed row.

    anchors_M int64, ascending and distinct · document_ids_T int64, −1 is padding · slots B of each block, the anchor's
    included · skip: leading slots whose final state nobody wants.
    """

    anchors_M: Tensor
    document_ids_T: Tensor
    slots: int
    skip: int = 0
    plans: dict[tuple[int | None, bool], BlockPlan] = field(default_factory=dict)

    def plan(self, window: int | None, causal: bool, from_anchor: bool) -> BlockPlan:
        """Which keys the blocks meet; made once for each kind of layer."""
        if window is not None and window >= self.document_ids_T.numel() + self.slots:
            window = None
        if (window, causal) not in self.plans:
            self.plans[window, causal] = plan_blocks(
                self.document_ids_T, self.anchors_M, self.slots, window=window, causal=causal, from_anchor=from_anchor
            )
        return self.plans[window, causal]


@dataclass(frozen=True)
class Context:
    """What every layer reads: features [T, H] and their rotation, the rotation of [M·B] slots, and the plan."""

    features_TH: Tensor
    rotation: Rotation
    slot_rotation: Rotation
    plan: BlockPlan


class BlockLayer(DecoderLayer):
    """A decoder layer whose queries are the slots of blocks, and whose keys are the context's and the block's own."""

    def __init__(self, geometry: LayerGeometry) -> None:
        super().__init__(geometry, input_size=geometry.hidden_size)

    def forward(self, hidden_MBH: Tensor, context: Context, skip: int) -> Tensor:
        """[M, B, H] to [M, B − skip, H]: the first `skip` slots lend their keys and end here."""
        x_MBH = self.input_layernorm(hidden_MBH)
        attended = attend_context(self.self_attn, x_MBH, context, skip)
        return self.finish(attended, hidden_MBH[:, skip:])


def attend_context(attention: SelfAttention, x_MBH: Tensor, context: Context, skip: int) -> Tensor:
    """Attention of normed block rows over context and block, output projection applied: [M, B − skip, H]."""
    blocks = x_MBH.shape[0]
    context_key = _turned(attention.k_norm, _heads(attention.k_proj, context.features_TH, attention), context.rotation)
    context_value = _heads(attention.v_proj, context.features_TH, attention)
    x_NH = x_MBH.flatten(0, 1)
    key = _turned(attention.k_norm, _heads(attention.k_proj, x_NH, attention), context.slot_rotation)
    value = _heads(attention.v_proj, x_NH, attention)
    asking_NH, rotation = x_NH, context.slot_rotation
    if skip:
        asking_NH = x_MBH[:, skip:].flatten(0, 1)
        cos, sin = (_by_block(part, blocks)[:, skip:].flatten(0, 1) for part in rotation)
        rotation = cos, sin
    query = _turned(attention.q_norm, _heads(attention.q_proj, asking_NH, attention), rotation)
    out = attend_blocks(
        _by_block(query, blocks),
        context_key,
        context_value,
        _by_block(key, blocks),
        _by_block(value, blocks),
        context.plan,
    )
    result: Tensor = attention.o_proj(out.flatten(2))
    return result


def _by_block(x: Tensor, blocks: int) -> Tensor:
    """[M·B, …] to [M, B, …]."""
    return x.reshape(blocks, -1, *x.shape[1:])


def _heads(projection: nn.Module, x_NH: Tensor, attention: SelfAttention) -> Tensor:
    projected: Tensor = projection(x_NH)
    return projected.view(x_NH.shape[0], -1, attention.head_dim)


def _turned(norm: RMSNorm | None, x_NhE: Tensor, rotation: Rotation) -> Tensor:
    assert norm is not None, "blocks are read by layers that norm their heads"
    return rotate(norm(x_NhE), rotation)


class BlockDraft(nn.Module):
    """Decoder layers over anchored blocks; algorithms put their heads on top.

    Args:
        knobs: shape and masks.
        geometry: dimensions of the layers.
        num_aux: A, features a token.
        vocabulary: reduced draft vocabulary, None for the verifier's own.
        mask_token_id: what fills a block behind its anchor.
        trains_mask: whether the mask's embedding is the draft's own, and trained.
        draft_logit_scale: factor on the draft's logits, as vLLM serves them.
    """

    def __init__(
        self,
        knobs: BlockKnobs,
        geometry: LayerGeometry,
        num_aux: int,
        vocabulary: ReducedVocabulary | None,
        *,
        mask_token_id: int,
        trains_mask: bool = False,
        draft_logit_scale: float = 1.0,
    ) -> None:
        super().__init__()
        hidden, eps = geometry.hidden_size, geometry.rms_norm_eps
        self.knobs, self.geometry, self.num_aux = knobs, geometry, num_aux
        self.mask_token_id, self.draft_logit_scale = mask_token_id, draft_logit_scale
        self.verifier_architectures: tuple[str, ...] = ()
        self.aux_layer_ids: tuple[int, ...] = ()
        self.embed_tokens = nn.Embedding(geometry.vocab_size, hidden, device="meta")
        self.mask_embedding = nn.Parameter(torch.zeros(hidden)) if trains_mask else None
        self.fc = nn.Linear(num_aux * hidden, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.layers = nn.ModuleList([self.make_layer() for _ in range(geometry.num_layers)])
        self.norm = RMSNorm(hidden, eps)
        draft_size = vocabulary.draft_size if vocabulary else geometry.vocab_size
        self.lm_head = nn.Linear(hidden, draft_size, bias=False, device="meta")
        self.rotary = Rotary(geometry)
        self.vocabulary = vocabulary
        self.d2t: Tensor | None
        self.register_buffer("d2t", vocabulary.d2t if vocabulary else None)
        self.register_buffer("t2d", vocabulary.t2d if vocabulary else None)
        self.teacher: Teacher | None = None

    def make_layer(self) -> nn.Module:
        """One decoder layer: (hidden_MBH, context, skip) -> [M, B − skip, H]."""
        return BlockLayer(self.geometry)

    def draw_heads(self, generator: torch.Generator) -> None:
        """Fresh weights of what an algorithm puts on top, where they are not drawn like all linear ones."""

    @torch.no_grad()
    def borrow(self, embed_VH: Tensor, head_DH: Tensor) -> None:
        """Put the verifier's embedding and head rows in place, frozen and in their own dtype.

        A mask embedding of the draft's own starts as that of the mask token.
        """
        self.embed_tokens.weight = nn.Parameter(embed_VH, requires_grad=False)
        self.lm_head.weight = nn.Parameter(head_DH, requires_grad=False)
        if self.mask_embedding is not None:
            self.mask_embedding.copy_(embed_VH[self.mask_token_id])

    def forward(self, input_ids_T: Tensor, position_ids_T: Tensor, aux_TAH: Tensor, blocks: Blocks) -> Tensor:
        """Fill in every block at once.

        Slot 0 of a block holds its anchor's token, the others the mask; slot k stands at the anchor's position + k.

        Returns:
            [M, B − skip, H]: normalised hidden states, ready for the vocabulary head.
        """
        features_TH = self.hidden_norm(self.fc(aux_TAH))
        anchors_M = blocks.anchors_M
        slots_B = torch.arange(blocks.slots, device=anchors_M.device)
        rotation = self.rotary(position_ids_T)
        slot_rotation = self.rotary((position_ids_T[anchors_M, None] + slots_B).flatten())
        hidden_MBH = self.embed(input_ids_T[anchors_M], blocks.slots).to(features_TH.dtype)
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            causal = self.knobs.causal(self.geometry.layer_types[index] == SLIDING)
            plan = blocks.plan(self.geometry.window(index), causal, self.knobs.compat)
            context = Context(features_TH, rotation, slot_rotation, plan)
            hidden_MBH = layer(hidden_MBH, context, blocks.skip if index == last else 0)
        normed: Tensor = self.norm(hidden_MBH)
        return normed

    def embed(self, tokens_M: Tensor, slots: int) -> Tensor:
        """Embeddings [M, B, H] of an anchor and masks behind it."""
        table = self.embed_tokens.weight
        anchor_MH = functional.embedding(tokens_M, table)
        mask_H = table[self.mask_token_id]
        if self.mask_embedding is not None:
            # as vLLM does it: wherever the token is the mask, the anchor included
            mask_H = self.mask_embedding
            anchor_MH = torch.where((tokens_M == self.mask_token_id)[:, None], mask_H, anchor_MH.to(mask_H.dtype))
        masks_MBH = mask_H.expand(tokens_M.numel(), slots - 1, -1)
        return torch.cat((anchor_MH[:, None], masks_MBH), dim=1)
