"""How DSpark learns, and how well it would be served."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from speculators_core.algorithms._blocks.block_objective import (
    LearnedBlocks,
    align_unshifted,
    block_loss,
    block_metrics,
    chance_metrics,
    expected_count,
    learned_blocks,
    loss_metrics,
    served_blocks,
    share_of,
    slot_weights,
    untouched,
)
from speculators_core.algorithms._blocks.chains import walk_reply
from speculators_core.algorithms.dspark.config import DSparkConfig
from speculators_core.algorithms.dspark.model import DSparkDraft
from speculators_core.types import Aligned, Batch, Counted, Sample, StepResult

COMPAT_EPSILON = 1e-8


class DSparkObjective:
    """Blocks corrected by the row's own tokens; the confidence learns the chance of acceptance that results."""

    def __init__(self, config: DSparkConfig) -> None:
        self.config = config

    def align(self, sample: Sample) -> Aligned:
        """Nothing is shifted: a block reads the features before its anchor."""
        return align_unshifted(sample)

    def denominators(self, batch: Batch) -> Tensor:
        """Links that are learned, float64 [1]."""
        return expected_count(self.config, batch)

    def step(self, model: nn.Module, batch: Batch, denominators: Tensor) -> StepResult:
        """Σ weight · ℓ / denominator over the slots of the drawn blocks, plus the confidence's loss.

        Metrics: those of the blocks (`block_metrics`, `chance_metrics`), `loss`, `<term>_loss` where the loss has
        several terms, and of the confidence `confidence_loss`, `_abs_error`, `_pred_mean` and `_cumprod_bias`.
        """
        assert isinstance(model, DSparkDraft)
        draft, config = model, self.config
        learned = learned_blocks(config, batch)
        if learned.count == 0:
            return StepResult(untouched(draft), {})
        hidden_MBH = draft(batch.input_ids, batch.position_ids, batch.aux_TAH, learned.blocks)
        previous_MB = draft.previous_tokens(batch.input_ids, learned.blocks.anchors_M, config.block_size)
        joined, confidence_MB = draft.correct(hidden_MBH, previous_MB)
        outcome = block_loss(
            draft,
            joined.unbind(1)[config.first_slot :],
            learned,
            batch,
            denominators,
            tail_DC=draft.tail,
            want_acceptance=True,
        )
        assert outcome.acceptance_SU is not None
        alpha_SM = learned.by_block(outcome.acceptance_SU)
        share = share_of(config, batch, denominators)
        loss = outcome.loss
        metrics: dict[str, Counted] = {}
        if confidence_MB is not None:
            confidence_SM = confidence_MB[:, config.first_slot :].T
            confidence_loss = self._confidence_loss(confidence_SM, alpha_SM, learned, denominators)
            loss = loss + config.confidence_head_alpha * confidence_loss
            metrics["confidence_loss"] = Counted(float(confidence_loss.detach()), share)
            metrics |= _confidence_metrics(torch.sigmoid(confidence_SM.detach()), alpha_SM, learned.counted_SM)
        metrics["loss"] = Counted(float(loss.detach()), share)
        metrics |= loss_metrics(config.loss_terms, outcome, share)
        metrics |= chance_metrics(alpha_SM, learned.counted_SM)
        metrics |= block_metrics(config, learned.by_block(outcome.correct_SU), learned.counted_SM)
        return StepResult(loss, metrics)

    def _confidence_loss(
        self, confidence_SM: Tensor, alpha_SM: Tensor, learned: LearnedBlocks, denominators: Tensor
    ) -> Tensor:
        epsilon = COMPAT_EPSILON if self.config.compat else 0.0
        denominator = (denominators[0].to(alpha_SM.device) + epsilon).clamp_min(1e-9).to(torch.float32)
        weights_SM = slot_weights(self.config, learned) / denominator
        losses_SM = functional.binary_cross_entropy_with_logits(confidence_SM.float(), alpha_SM, reduction="none")
        return (losses_SM * weights_SM).sum()

    def walk(self, model: nn.Module, aligned: Aligned, k: int) -> Sequence[int]:
        """Accepted drafts at each drafting point of the replies in one row, see `walk_chains`.

        Until a rejection the token before each slot is the reply's, so the correction is known for all slots at once.
        """
        assert isinstance(model, DSparkDraft)
        draft, config = model, self.config
        head = draft.lm_head.weight if draft.tail is None else None

        def states(row: Aligned, documents_T: Tensor, anchors_M: Tensor) -> Sequence[Tensor]:
            blocks = served_blocks(config, documents_T, anchors_M, k)
            hidden_MBH = draft(row.input_ids, row.position_ids, row.aux_TAH, blocks)
            previous_MB = draft.previous_tokens(row.input_ids, anchors_M, blocks.slots)
            return draft.correct(hidden_MBH, previous_MB)[0].unbind(1)[config.first_slot :]

        if head is None:
            assert draft.tail is not None
            head = torch.cat((draft.lm_head.weight, draft.tail.to(draft.lm_head.weight.dtype)), dim=1)
        return walk_reply(aligned, k, states, draft.d2t, head, config.loss_chunk)


def _confidence_metrics(chance_SM: Tensor, alpha_SM: Tensor, counted_SM: Tensor) -> dict[str, Counted]:
    """Σ over the links that count: how far it is off, what it says, and how far the chance to get there is off."""
    count = float(counted_SM.sum())

    def total(values_SM: Tensor) -> Counted:
        return Counted(float((values_SM * counted_SM).sum()), count)

    reached = torch.cumprod(chance_SM * counted_SM, dim=0) - torch.cumprod(alpha_SM * counted_SM, dim=0)
    return {
        "confidence_abs_error": total((chance_SM - alpha_SM).abs()),
        "confidence_pred_mean": total(chance_SM),
        "confidence_cumprod_bias": total(reached),
    }
