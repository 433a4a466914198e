"""The DSpark draft: the backbone of blocks with a Markov head and a confidence head."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from speculators_core.algorithms._blocks.block_draft import BlockDraft
from speculators_core.algorithms._blocks.geometry import LayerGeometry
from speculators_core.algorithms._blocks.markov import ConfidenceHead, MarkovHead
from speculators_core.algorithms._blocks.vocabulary import ReducedVocabulary

if TYPE_CHECKING:
    from speculators_core.algorithms.dspark.config import DSparkConfig


class DSparkDraft(BlockDraft):
    """See `BlockDraft`; the heads read the normalised states of the slots.

    Args:
        config: the knobs.
        geometry, num_aux, vocabulary, mask_token_id, draft_logit_scale: of the backbone.
    """

    def __init__(
        self,
        config: DSparkConfig,
        geometry: LayerGeometry,
        num_aux: int,
        vocabulary: ReducedVocabulary | None,
        *,
        mask_token_id: int,
        draft_logit_scale: float = 1.0,
    ) -> None:
        super().__init__(
            config, geometry, num_aux, vocabulary, mask_token_id=mask_token_id, draft_logit_scale=draft_logit_scale
        )
        self.config = config
        rank, hidden = config.markov_rank, geometry.hidden_size
        draft_size = self.lm_head.weight.shape[0]
        self.markov_head = (
            MarkovHead(geometry.vocab_size, draft_size, rank, hidden, config.markov_head_type) if rank else None
        )
        self.reads_markov = config.confidence_head_with_markov and rank > 0
        width = hidden + (rank if self.reads_markov else 0)
        self.confidence_head = ConfidenceHead(width) if config.enable_confidence_head else None

    def draw_heads(self, generator: torch.Generator) -> None:
        """Fresh heads from the generator."""
        if self.markov_head is not None:
            self.markov_head.draw(generator)
        if self.confidence_head is not None:
            self.confidence_head.draw()

    def correct(self, hidden_MBH: Tensor, previous_MB: Tensor) -> tuple[Tensor, Tensor | None]:
        """States with the correction's factors beside them, and the confidence's logits.

        Args:
            hidden_MBH: normalised states of all slots.
            previous_MB: verifier ids of the tokens before those that the slots are asked for.

        Returns:
            [M, B, H + r], whose logits are those of head and `tail` side by side · float32 [M, B], or None.
        """
        if self.markov_head is None:
            return hidden_MBH, None if self.confidence_head is None else self.confidence_head(hidden_MBH)
        embedded_MBr = self.markov_head.embed(previous_MB).to(hidden_MBH.dtype)
        factors_MBr = self.markov_head(embedded_MBr, hidden_MBH)
        joined = torch.cat((hidden_MBH, factors_MBr.to(hidden_MBH.dtype)), dim=-1)
        confidence = None
        if self.confidence_head is not None:
            features = torch.cat((hidden_MBH, embedded_MBr), dim=-1) if self.reads_markov else hidden_MBH
            confidence = self.confidence_head(features)
        return joined, confidence

    @property
    def tail(self) -> Tensor | None:
        """[D, r]: trained columns beside the vocabulary head."""
        return None if self.markov_head is None else self.markov_head.markov_w2.weight

    def previous_tokens(self, input_ids_T: Tensor, anchors_M: Tensor, slots: int) -> Tensor:
        """int64 [M, B]: the token before the one that each slot is asked for, as the row has it.

        Slot 0 of a block whose anchor does not draft has the anchor itself.
        """
        offsets_B = torch.arange(slots, device=anchors_M.device)
        if not self.knobs.sample_from_anchor:
            offsets_B = (offsets_B - 1).clamp_min(0)
        padded_TP = functional.pad(input_ids_T, (0, slots))
        return padded_TP[anchors_M[:, None] + offsets_B]
