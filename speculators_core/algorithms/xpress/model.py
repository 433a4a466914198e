"""The XPress draft: the backbone of blocks with a causal refiner."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from speculators_core.algorithms._blocks.block_draft import BlockDraft
from speculators_core.algorithms._blocks.geometry import LayerGeometry
from speculators_core.algorithms._blocks.refiner import BlockRefiner
from speculators_core.algorithms._blocks.vocabulary import ReducedVocabulary
from speculators_core.losses.best import best_index

if TYPE_CHECKING:
    from speculators_core.algorithms.xpress.config import XPressConfig


class XPressDraft(BlockDraft):
    """See `BlockDraft`; the refiner reads the normalised states of the slots.

    Args:
        config: the knobs.
        geometry, num_aux, vocabulary, mask_token_id, draft_logit_scale: of the backbone.
    """

    def __init__(
        self,
        config: XPressConfig,
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
        self.refiner_head = BlockRefiner(
            geometry.vocab_size,
            self.lm_head.weight.shape[0],
            config.xpress_rank,
            geometry.hidden_size,
            config.xpress_mlp_ratio,
            config.block_size,
        )

    def draw_heads(self, generator: torch.Generator) -> None:
        """A fresh refiner."""
        self.refiner_head.draw(self.geometry.initializer_range, generator)

    def known_tokens(self, input_ids_T: Tensor, document_ids_T: Tensor, anchors_M: Tensor) -> Tensor:
        """int64 [M, B]: the token before each slot, as the row has it.

        Where masks alone draft, slot 0 has the token before the anchor, or the anchor where its document begins.
        """
        slots = self.config.block_size
        offsets_B = torch.arange(slots, device=anchors_M.device)
        padded_TP = functional.pad(input_ids_T, (0, slots))
        if self.config.sample_from_anchor:
            return padded_TP[anchors_M[:, None] + offsets_B]
        before_M = (anchors_M - 1).clamp_min(0)
        begins_M = (anchors_M == 0) | (document_ids_T[before_M] != document_ids_T[anchors_M])
        rows_MB = anchors_M[:, None] + offsets_B - 1
        rows_MB[:, 0] = torch.where(begins_M, anchors_M, before_M)
        return padded_TP[rows_MB]

    @torch.no_grad()
    def rounds(self, hidden_MBH: Tensor, known_MB: Tensor, count: int, chunk: int) -> list[Tensor]:
        """Tokens before each slot in rounds 0..count of free-running refinement, int64 [M, B] each.

        Round 0 takes the backbone's own best tokens, each later one those of the round before, moved on by a slot; what
        stands up to the anchor is known. The last entry's tokens, one slot on, are what `count` rounds propose.
        """
        head_DH = self.lm_head.weight.to(hidden_MBH.dtype)
        tail_Dr = self.refiner_head.readout.weight.to(hidden_MBH.dtype)
        known = 1 if self.config.sample_from_anchor else 2  # slots whose token before is known
        blocks = max(1, chunk // hidden_MBH.shape[1])
        parts: list[list[Tensor]] = []
        for hidden, known_mB in zip(torch.split(hidden_MBH, blocks), torch.split(known_MB, blocks), strict=True):
            base = hidden @ head_DH.T
            states = self.refiner_head.states(hidden)
            logits, found = base, []
            for turn in range(count + 1):
                best = self._verifier_ids(best_index(logits))
                moved = torch.cat((known_mB[:, :known], best[:, known - 1 : -1]), dim=1)
                found.append(best if turn == count else moved)
                if turn < count:
                    u = self.refiner_head(states, moved)
                    logits = base + u.to(base.dtype) @ tail_Dr.T
            parts.append(found)
        return [torch.cat(turn) for turn in zip(*parts, strict=True)]

    def _verifier_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids if self.d2t is None else draft_ids + self.d2t[draft_ids]
