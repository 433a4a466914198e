"""The P-EAGLE pass: every depth of every chosen chain in one go.

All masked rows enter the first layer with the same embedding and the same features, so its projections are computed for
one of them; only their positions differ. Of the attention, the part over real rows is the causal one that the plan cuts
into pieces, and the rest is a handful of keys of the row's own chain: no mask over elements exists.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from speculators_core.algorithms._blocks.attention import attend
from speculators_core.algorithms._blocks.chains import ROUNDING
from speculators_core.algorithms._blocks.feature_draft import FeatureDraft
from speculators_core.algorithms._blocks.geometry import LayerGeometry
from speculators_core.algorithms._blocks.layers import DecoderLayer, SelfAttention
from speculators_core.algorithms._blocks.rotary import Rotation, rotate
from speculators_core.algorithms._blocks.vocabulary import ReducedVocabulary
from speculators_core.algorithms.peagle.config import PEagleConfig
from speculators_core.algorithms.peagle.elements import Elements


class PEagleDraft(FeatureDraft):
    """A feature draft with the token and the features of masked rows, both trained.

    Args:
        mask_token_id: its embedding row stands in masked rows.
    """

    config: PEagleConfig

    def __init__(
        self,
        config: PEagleConfig,
        geometry: LayerGeometry,
        num_aux: int,
        vocabulary: ReducedVocabulary | None,
        mask_token_id: int,
        *,
        draft_logit_scale: float = 1.0,
    ) -> None:
        super().__init__(
            config, geometry, num_aux, vocabulary, draft_logit_scale=draft_logit_scale, train_embedding=True
        )
        self.mask_token_id = mask_token_id
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, num_aux * geometry.hidden_size))

    def forward(self, input_ids_T: Tensor, position_ids_T: Tensor, aux_TAH: Tensor, elements: Elements) -> list[Tensor]:
        """One pass over a packed row and the masked rows behind it.

        Real rows whose states are not wanted only lend keys to the others: in the last layer nothing else is computed
        for them.

        Returns:
            for each depth [R_d, H]: normalised hidden states of its elements, ready for the vocabulary head.
        """
        # rounded up, as each new shape costs a kernel; and never none, so that every parameter is in every graph
        masked = max(1, -(-elements.num_masked // ROUNDING)) * ROUNDING
        ids_N = torch.cat((input_ids_T, input_ids_T.new_tensor([self.mask_token_id])))
        hidden_NH = self.join(torch.cat((aux_TAH, self.mask_hidden[0].to(aux_TAH.dtype))))
        embeds_NH = functional.embedding(ids_N, self.embed_tokens.weight).to(hidden_NH.dtype)
        positions = [position_ids_T[rows] + depth for depth, rows in enumerate(elements.anchors)][1:]
        positions.append(position_ids_T.new_zeros(masked - elements.num_masked))
        rotations = self.rotary(position_ids_T), self.rotary(torch.cat(positions))
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            rows_R = elements.anchors[0] if index == last else None
            x_NC, residual_NH = self.enter(layer, embeds_NH, hidden_NH)
            attended = self._attend(layer.self_attn, x_NC, rows_R, rotations, elements, self.geometry.window(index))
            real_RH, mask_MH = _parts(residual_NH, input_ids_T.numel(), masked)
            residual = torch.cat((real_RH if rows_R is None else real_RH[rows_R], mask_MH))
            hidden_NH = layer.finish(attended, residual)
        counts = [rows.numel() for rows in elements.anchors]
        return list(self.norm(hidden_NH).split([*counts, masked - elements.num_masked])[:-1])

    def _attend(
        self,
        attention: SelfAttention,
        x_NC: Tensor,
        rows_R: Tensor | None,
        rotations: tuple[Rotation, Rotation],
        elements: Elements,
        window: int | None,
    ) -> Tensor:
        """[R + M, H]: attention of the wanted real rows and of all masked rows, output projection applied."""
        real, mask = rotations
        count, masked = elements.document_ids_T.numel(), mask[0].shape[0]
        asking = None
        if rows_R is not None:
            asking = torch.cat((rows_R, torch.arange(count, x_NC.shape[0], device=x_NC.device)))
        query, key, value = attention.heads(x_NC, asking)
        query_rotation = real if rows_R is None else (real[0][rows_R], real[1][rows_R])
        query_RhE, query_MhE = _parts(query, query_rotation[0].shape[0], masked)
        key_TgE, key_MgE = _parts(key, count, masked)
        value_TgE, value_MgE = _parts(value, count, masked)
        key_TgE, key_MgE = rotate(key_TgE, real), rotate(key_MgE, mask)
        query_RhE, query_MhE = rotate(query_RhE, query_rotation), rotate(query_MhE, mask)
        first = elements.plan(None if rows_R is None else 0, window)
        out = [attend(query_RhE, key_TgE, value_TgE, first)]
        own_keys: list[Tensor] = []
        own_values: list[Tensor] = []
        begin = 0
        for depth, anchors in enumerate(elements.anchors[1:], start=1):
            here = slice(begin, begin + anchors.numel())
            begin = here.stop
            if depth > 1:
                kept = torch.searchsorted(elements.anchors[depth - 1], anchors)
                own_keys = [keys[kept] for keys in own_keys]
                own_values = [values[kept] for values in own_values]
            own_keys.append(key_MgE[here])
            own_values.append(value_MgE[here])
            plan = elements.plan(depth, window)
            out.append(attend(query_MhE[here], key_TgE, value_TgE, plan, own_keys, own_values))
        out.append(torch.zeros_like(query_MhE[begin:]))
        result: Tensor = attention.o_proj(torch.cat(out).flatten(1))
        return result


def _parts(x_N: Tensor, count: int, masked: int) -> tuple[Tensor, Tensor]:
    """The first `count` rows, and the masked ones: M rows, or one that stands for all of them."""
    mask = x_N[count:]
    return x_N[:count], mask if mask.shape[0] == masked else mask.expand(masked, *mask.shape[1:])
