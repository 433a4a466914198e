"""The EAGLE-3 draft: verifier features and token embeddings in, hidden states for the vocabulary head out.

Parameter names are those of the served file, so that export only has to choose and cast.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from speculators_core.algorithms._blocks.attention import AttentionPlan, plan_attention
from speculators_core.algorithms._blocks.geometry import LayerGeometry
from speculators_core.algorithms._blocks.layers import DecoderLayer, LayerCache
from speculators_core.algorithms._blocks.norms import RMSNorm
from speculators_core.algorithms._blocks.rotary import Rotary
from speculators_core.algorithms._blocks.teacher import Teacher
from speculators_core.algorithms._blocks.vocabulary import ReducedVocabulary

if TYPE_CHECKING:
    from speculators_core.algorithms.eagle3.config import Eagle3Config


class FirstLayer(DecoderLayer):
    """A decoder layer whose attention reads the token's embedding beside the feature, both normed."""

    def __init__(self, geometry: LayerGeometry) -> None:
        super().__init__(geometry, input_size=2 * geometry.hidden_size)
        self.hidden_norm = RMSNorm(geometry.hidden_size, geometry.rms_norm_eps)


@dataclass(frozen=True)
class Drafting:
    """Where a packed row is drafted from.

    rows_R int64, ascending: the rows that are unrolled · document_ids_T int64: −1 is padding.
    """

    rows_R: Tensor
    document_ids_T: Tensor
    plans: dict[tuple[bool, int | None, int], AttentionPlan] = field(default_factory=dict)

    def plan(self, every_row: bool, window: int | None, shift: int) -> AttentionPlan:
        """Which keys the drafting rows (or all rows) meet; made once for each window that cuts anything."""
        if window is None or window - shift >= self.document_ids_T.numel():
            window, shift = None, 0
        key = (every_row, window, shift)
        if key not in self.plans:
            rows_R = None if every_row else self.rows_R
            self.plans[key] = plan_attention(self.document_ids_T, rows_R, window, shift=shift)
        return self.plans[key]


class Eagle3Draft(nn.Module):
    """One or more decoder layers over joined verifier features.

    Args:
        config: the knobs.
        geometry: dimensions of the layers.
        num_aux: A, features a token.
        vocabulary: reduced draft vocabulary, None for the verifier's own.
        draft_logit_scale: factor on the draft's logits, as vLLM serves them.
    """

    def __init__(
        self,
        config: Eagle3Config,
        geometry: LayerGeometry,
        num_aux: int,
        vocabulary: ReducedVocabulary | None,
        *,
        draft_logit_scale: float = 1.0,
    ) -> None:
        super().__init__()
        hidden, eps = geometry.hidden_size, geometry.rms_norm_eps
        self.config, self.geometry, self.num_aux = config, geometry, num_aux
        self.draft_logit_scale = draft_logit_scale
        self.verifier_architectures: tuple[str, ...] = ()
        self.aux_layer_ids: tuple[int, ...] = ()
        self.embed_tokens = nn.Embedding(geometry.vocab_size, hidden, device="meta")
        self.input_norm = RMSNorm(num_aux * hidden, eps) if config.norm_before_fc else None
        self.fc_norm = nn.ModuleList([RMSNorm(hidden, eps) for _ in range(num_aux)]) if config.fc_norm else None
        self.fc = nn.Linear(num_aux * hidden, hidden, bias=False)
        self.layers = nn.ModuleList(
            [FirstLayer(geometry), *(DecoderLayer(geometry, hidden) for _ in range(geometry.num_layers - 1))]
        )
        self.norm = RMSNorm(hidden, eps)
        draft_size = vocabulary.draft_size if vocabulary else geometry.vocab_size
        self.lm_head = nn.Linear(hidden, draft_size, bias=False, device="meta")
        self.rotary = Rotary(geometry)
        self.vocabulary = vocabulary
        self.d2t: Tensor | None
        self.register_buffer("d2t", vocabulary.d2t if vocabulary else None)
        self.register_buffer("t2d", vocabulary.t2d if vocabulary else None)
        self.teacher: Teacher | None = None

    def borrow(self, embed_VH: Tensor, head_DH: Tensor) -> None:
        """Put the verifier's embedding and head rows in place, frozen and in their own dtype.

        A head that is to be trained is copied to float32.
        """
        trained = self.config.train_lm_head
        self.embed_tokens.weight = nn.Parameter(embed_VH, requires_grad=False)
        self.lm_head.weight = nn.Parameter(head_DH.float().clone() if trained else head_DH, requires_grad=trained)

    def join(self, aux_TAH: Tensor) -> Tensor:
        """Features [T, A·H] to the draft's own width [T, H]."""
        if self.input_norm is not None:
            aux_TAH = self.input_norm(aux_TAH)
        elif self.fc_norm is not None:
            parts = aux_TAH.chunk(self.num_aux, dim=-1)
            aux_TAH = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        result: Tensor = self.fc(aux_TAH)
        return result

    def forward(
        self, input_ids_T: Tensor, position_ids_T: Tensor, aux_TAH: Tensor, drafting: Drafting, steps: int
    ) -> list[Tensor]:
        """Unroll from every drafting row at once, fed with the row's real tokens.

        Step s of row j reads token j + s (0 past the end) at position + s, the state that step s − 1 of the same row
        left, the context's keys up to j, and its own keys of steps 1..s. That is what a served draft computes as
        long as its proposals are accepted. Rows that are not drafted from only lend keys to the others, so the last
        layer, and every later step, is computed for drafting rows alone.

        Returns:
            for each step [R, H]: normalised hidden states, ready for the vocabulary head.
        """
        rows_R = drafting.rows_R
        caches = [LayerCache() for _ in self.layers]
        features_NH = self.join(aux_TAH)
        following_TP = functional.pad(input_ids_T, (0, steps))
        outputs: list[Tensor] = []
        for step in range(steps):
            first = step == 0
            token_rows = rows_R + step
            tokens_N = input_ids_T if first else following_TP[token_rows]
            positions_N = position_ids_T if first else position_ids_T[rows_R] + step
            embeds_NH = functional.embedding(tokens_N, self.embed_tokens.weight).to(features_NH.dtype)
            out_RH = self._layers(embeds_NH, features_NH, positions_N, drafting, step, caches)
            normed_RH = self.norm(out_RH)
            outputs.append(normed_RH)
            features_NH = normed_RH if self.config.norm_output else out_RH
        return outputs

    def _layers(
        self,
        embeds_NH: Tensor,
        features_NH: Tensor,
        positions_N: Tensor,
        drafting: Drafting,
        step: int,
        caches: list[LayerCache],
    ) -> Tensor:
        rotation = self.rotary(positions_N)
        last = len(self.layers) - 1
        hidden_NH = features_NH
        for index, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            assert isinstance(layer, DecoderLayer)
            narrow = step == 0 and index == last  # only drafting rows go on from here
            rows = drafting.rows_R if narrow else None
            if isinstance(layer, FirstLayer):
                normed_NH = layer.hidden_norm(hidden_NH)
                residual_NH = normed_NH if self.config.norm_before_residual else hidden_NH
                x_NC = torch.cat((layer.input_layernorm(embeds_NH), normed_NH), dim=-1)
            else:
                residual_NH, x_NC = hidden_NH, layer.input_layernorm(hidden_NH)
            query_rotation = rotation
            if rows is not None:
                residual_NH = residual_NH[rows]
                query_rotation = (rotation[0][rows], rotation[1][rows])
            # Served, the window moves with the position of the drafted token; speculators 0.9 leaves it at the row.
            shift = 0 if self.config.compat else step
            plan = drafting.plan(step == 0 and not narrow, self.geometry.window(index), shift)
            attended = layer.self_attn(x_NC, rows, rotation, query_rotation, plan, cache)
            hidden_NH = layer.finish(attended, residual_NH)
        return hidden_NH
