"""The network of drafts that continue the verifier's own features (arXiv 2503.01840): what its passes have in common.

Parameter names are those of the served file, so that export only has to choose and cast.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from speculators_core.algorithms._blocks.feature_knobs import FeatureKnobs
from speculators_core.algorithms._blocks.geometry import LayerGeometry
from speculators_core.algorithms._blocks.layers import DecoderLayer
from speculators_core.algorithms._blocks.norms import RMSNorm
from speculators_core.algorithms._blocks.rotary import Rotary
from speculators_core.algorithms._blocks.teacher import Teacher
from speculators_core.algorithms._blocks.vocabulary import ReducedVocabulary


class FirstLayer(DecoderLayer):
    """A decoder layer whose attention reads the token's embedding beside the feature, both normed."""

    def __init__(self, geometry: LayerGeometry) -> None:
        super().__init__(geometry, input_size=2 * geometry.hidden_size)
        self.hidden_norm = RMSNorm(geometry.hidden_size, geometry.rms_norm_eps)


class FeatureDraft(nn.Module):
    """One or more decoder layers over joined verifier features; how they are run is the algorithm's own.

    Args:
        knobs: shape and switches.
        geometry: dimensions of the layers.
        num_aux: A, features a token.
        vocabulary: reduced draft vocabulary, None for the verifier's own.
        draft_logit_scale: factor on the draft's logits, as vLLM serves them.
        train_embedding: the token embedding starts as the verifier's and is trained.
    """

    def __init__(
        self,
        knobs: FeatureKnobs,
        geometry: LayerGeometry,
        num_aux: int,
        vocabulary: ReducedVocabulary | None,
        *,
        draft_logit_scale: float = 1.0,
        train_embedding: bool = False,
    ) -> None:
        super().__init__()
        hidden, eps = geometry.hidden_size, geometry.rms_norm_eps
        self.config, self.geometry, self.num_aux = knobs, geometry, num_aux
        self.draft_logit_scale, self.train_embedding = draft_logit_scale, train_embedding
        self.verifier_architectures: tuple[str, ...] = ()
        self.aux_layer_ids: tuple[int, ...] = ()
        self.embed_tokens = nn.Embedding(geometry.vocab_size, hidden, device="meta")
        self.input_norm = RMSNorm(num_aux * hidden, eps) if knobs.norm_before_fc else None
        self.fc_norm = nn.ModuleList([RMSNorm(hidden, eps) for _ in range(num_aux)]) if knobs.fc_norm else None
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

        A table that is to be trained is copied to float32.
        """
        self.embed_tokens.weight = _parameter(embed_VH, trained=self.train_embedding)
        self.lm_head.weight = _parameter(head_DH, trained=self.config.train_lm_head)

    def join(self, aux_TAH: Tensor) -> Tensor:
        """Features [T, A·H] to the draft's own width [T, H]."""
        if self.input_norm is not None:
            aux_TAH = self.input_norm(aux_TAH)
        elif self.fc_norm is not None:
            parts = aux_TAH.chunk(self.num_aux, dim=-1)
            aux_TAH = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        result: Tensor = self.fc(aux_TAH)
        return result

    def enter(self, layer: nn.Module, embeds_NH: Tensor, hidden_NH: Tensor) -> tuple[Tensor, Tensor]:
        """What a layer's attention reads ([N, 2H] in the first layer, else [N, H]), and its residual [N, H]."""
        assert isinstance(layer, DecoderLayer)
        if not isinstance(layer, FirstLayer):
            return layer.input_layernorm(hidden_NH), hidden_NH
        normed_NH = layer.hidden_norm(hidden_NH)
        residual_NH = normed_NH if self.config.norm_before_residual else hidden_NH
        return torch.cat((layer.input_layernorm(embeds_NH), normed_NH), dim=-1), residual_NH


def _parameter(table: Tensor, *, trained: bool) -> nn.Parameter:
    return nn.Parameter(table.float().clone() if trained else table, requires_grad=trained)
