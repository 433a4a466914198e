"""How DFlash learns, and how well it would be served."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from speculators_core.algorithms._blocks.block_objective import (
    align_unshifted,
    block_loss,
    block_metrics,
    expected_count,
    learned_blocks,
    loss_metrics,
    served_blocks,
    share_of,
    untouched,
)
from speculators_core.algorithms._blocks.chains import walk_reply
from speculators_core.algorithms.dflash.config import DFlashConfig
from speculators_core.algorithms.dflash.model import DFlashDraft
from speculators_core.types import Aligned, Batch, Counted, Sample, StepResult


class DFlashObjective:
    """Blocks behind every token that the verifier wrote, each slot held against the verifier's own distribution."""

    def __init__(self, config: DFlashConfig) -> None:
        self.config = config

    def align(self, sample: Sample) -> Aligned:
        """Nothing is shifted: a block reads the features before its anchor."""
        return align_unshifted(sample)

    def denominators(self, batch: Batch) -> Tensor:
        """Links that are learned, float64 [1]."""
        return expected_count(self.config, batch)

    def step(self, model: nn.Module, batch: Batch, denominators: Tensor) -> StepResult:
        """Σ weight · ℓ / denominator over the slots of the drawn blocks.

        Metrics: `loss`, `<term>_loss` where the loss has several terms, `full_acc`, `position_k_acc`, `eal`; without
        gradients, and not with `compat`, also `accept_rate`.
        """
        assert isinstance(model, DFlashDraft)
        draft, config = model, self.config
        learned = learned_blocks(config, batch, skip=config.first_slot)
        if learned.count == 0:
            return StepResult(untouched(draft), {})
        hidden_MSH = draft(batch.input_ids, batch.position_ids, batch.aux_TAH, learned.blocks)
        evaluating = not torch.is_grad_enabled() and not config.compat
        outcome = block_loss(draft, hidden_MSH.unbind(1), learned, batch, denominators, want_acceptance=evaluating)
        share = share_of(config, batch, denominators)
        metrics = {"loss": Counted(float(outcome.loss.detach()), share)}
        metrics |= loss_metrics(config.loss_terms, outcome, share)
        metrics |= block_metrics(config, learned.by_block(outcome.correct_SU), learned.counted_SM)
        if outcome.acceptance_SU is not None:
            alpha_SM = learned.by_block(outcome.acceptance_SU) * learned.counted_SM
            metrics["accept_rate"] = Counted(float(alpha_SM.sum()), float(learned.counted_SM.sum()))
        return StepResult(outcome.loss, metrics)

    def walk(self, model: nn.Module, aligned: Aligned, k: int) -> Sequence[int]:
        """Accepted drafts at each drafting point of the replies in one row, see `walk_chains`."""
        assert isinstance(model, DFlashDraft)
        draft, config = model, self.config

        def states(row: Aligned, documents_T: Tensor, anchors_M: Tensor) -> Sequence[Tensor]:
            blocks = served_blocks(config, documents_T, anchors_M, k, skip=config.first_slot)
            hidden_MSH: Tensor = draft(row.input_ids, row.position_ids, row.aux_TAH, blocks)
            return hidden_MSH.unbind(1)

        return walk_reply(aligned, k, states, draft.d2t, draft.lm_head.weight, config.loss_chunk)
