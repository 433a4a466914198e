"""How EAGLE-3 learns, and how well it would be served."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from speculators_core.algorithms._blocks.chains import (
    COMPAT_EPSILON,
    align_shifted,
    at_targets,
    by_row,
    counted_links,
    pair_targets,
    rounded_up,
    walk_reply,
)
from speculators_core.algorithms._blocks.unrolled import Drafting
from speculators_core.algorithms.eagle3.config import Eagle3Config
from speculators_core.algorithms.eagle3.model import Eagle3Draft
from speculators_core.losses.fused import UnrolledTargets, unrolled_loss
from speculators_core.metrics.acceptance import unrolled_metrics
from speculators_core.types import Aligned, Batch, Counted, Sample, StepResult


class Eagle3Objective:
    """Teacher-forced unroll ("training-time test"): step s continues from the draft's own state of step s − 1.

    After alignment row j holds token x_{j+1}, features a_j and the verifier state y_{j+1}, whose distribution
    predicts x_{j+2}. Step s of row j is asked for x_{j+2+s}. It counts when every token that the chain has drafted
    by then was written by the verifier and lies in the same document, so the first token of a reply is learned and
    nothing is learned past its end. With `compat` it counts when token x_{j+1+s} is a reply's, wherever documents
    end.
    """

    def __init__(self, config: Eagle3Config) -> None:
        self.config = config

    def align(self, sample: Sample) -> Aligned:
        """Pair each token with the features of the token before it, as vLLM's proposer does."""
        return align_shifted(sample)

    def denominators(self, batch: Batch) -> Tensor:
        """Counted rows of each step, float64 [S]."""
        return self._counted(batch).sum(dim=1).to(torch.float64)

    def step(self, model: nn.Module, batch: Batch, denominators: Tensor) -> StepResult:
        """Σ_s decay^s · Σ_j ℓ(s, j) / denominators[s], with the acceptance of every step.

        Metrics: `loss` and `loss_k` (their counts are this batch's share of the denominators, so that pooling a
        step's micro-batches gives that step's loss), `<term>_loss_k` where the loss has several terms, `full_acc_k`,
        `cond_acc_k`, and, when not `compat`, `eal` (over all positions); without gradients also `accept_rate_k`.
        """
        assert isinstance(model, Eagle3Draft)
        draft = model
        teacher = draft.teacher
        assert teacher is not None, "the model was built without its verifier"
        config, steps = self.config, self.config.ttt_steps
        counted_ST = self._counted(batch)
        rows_R = rounded_up(counted_ST.any(dim=0), batch.document_ids)
        denominators_S = denominators.to(counted_ST.device, torch.float64)
        if config.compat:
            denominators_S = denominators_S + COMPAT_EPSILON
        hidden_SRH = draft(
            batch.input_ids, batch.position_ids, batch.aux_TAH, Drafting(rows_R, batch.document_ids), steps
        )
        decay_S = config.ttt_step_loss_decay ** torch.arange(steps, dtype=torch.float64, device=rows_R.device)
        weight_S = (decay_S / denominators_S.clamp_min(1e-9)).float()
        # speculators 0.9 asks whether a chain was right at every step so far, counted or not
        asked_SR = counted_ST.any(dim=0).expand_as(counted_ST)[:, rows_R] if config.compat else counted_ST[:, rows_R]
        targets_U, rows_SU = pair_targets(rows_R, asked_SR, batch.input_ids.numel())
        weights_SU = torch.where(rows_SU >= 0, at_targets(counted_ST[:, rows_R], rows_SU) * weight_S[:, None], 0.0)
        if rows_R.numel() == 0:
            # every trained parameter stays in the graph, or the reduction over ranks would wait for it
            touched = [*hidden_SRH, *((draft.lm_head.weight,) if draft.lm_head.weight.requires_grad else ())]
            return StepResult(torch.stack([tensor.float().sum() for tensor in touched]).sum() * 0.0, {})
        last_UH = batch.last_TH[targets_U]
        compute = hidden_SRH[0].dtype
        evaluating = not torch.is_grad_enabled()
        outcome = unrolled_loss(
            hidden_SRH,
            draft.lm_head.weight,
            lambda window: teacher.logits(last_UH[window], compute),
            UnrolledTargets(rows_SU, weights_SU),
            config.loss_terms,
            logit_scale=draft.draft_logit_scale,
            chunk=config.loss_chunk,
            want_acceptance=evaluating and not config.compat,
        )
        correct_SR = by_row(outcome.correct_SU, rows_SU, rows_R.numel())
        share_S = (counted_ST.sum(dim=1) / denominators.to(counted_ST.device).clamp_min(1e-9)).tolist()
        metrics = self._losses(outcome.loss, outcome.term_sums_SN, share_S)
        metrics |= unrolled_metrics(
            correct_SR, counted_ST[:, rows_R], self._started(batch, rows_R, steps) if config.compat else None
        )
        if outcome.acceptance_SU is not None:
            alpha_SR = by_row(outcome.acceptance_SU, rows_SU, rows_R.numel())
            for number in range(steps):
                chosen = counted_ST[number, rows_R]
                metrics[f"accept_rate_{number}"] = Counted(float(alpha_SR[number][chosen].sum()), float(chosen.sum()))
        return StepResult(outcome.loss, metrics)

    def walk(self, model: nn.Module, aligned: Aligned, k: int) -> Sequence[int]:
        """Accepted drafts at each drafting point of the replies in one row, see `walk_reply`."""
        assert isinstance(model, Eagle3Draft)
        draft = model

        def propose(row: Aligned, documents_T: Tensor, rows_R: Tensor) -> Sequence[Tensor]:
            hidden_SRH: list[Tensor] = draft(
                row.input_ids, row.position_ids, row.aux_TAH, Drafting(rows_R, documents_T), k
            )
            return hidden_SRH

        return walk_reply(aligned, k, propose, draft.d2t, draft.lm_head.weight, self.config.loss_chunk)

    def _counted(self, batch: Batch) -> Tensor:
        """bool [S, T]: which rows count at which step."""
        steps, mask = self.config.ttt_steps, batch.loss_mask.bool()
        if not self.config.compat:
            return counted_links(mask, batch.document_ids, steps)
        counted = torch.zeros(steps, mask.numel(), dtype=torch.bool, device=mask.device)
        for step in range(steps):
            counted[step, : mask.numel() - step] = mask[step:]
        return counted

    def _started(self, batch: Batch, rows_R: Tensor, steps: int) -> Tensor:
        """bool [S, R]: rows whose own token is a reply's and whose target lies in the row, for `compat` counts."""
        own_R = batch.loss_mask.bool()[rows_R]
        reach_R = batch.input_ids.numel() - rows_R
        return torch.stack([own_R & (reach_R > step) for step in range(steps)])

    def _losses(self, loss: Tensor, sums_SN: Tensor, share_S: Sequence[float]) -> dict[str, Counted]:
        terms = self.config.loss_terms
        metrics = {"loss": Counted(float(loss.detach()), share_S[0])}
        for step, sums in enumerate(sums_SN.tolist()):
            weighted = sum(term.weight * value for term, value in zip(terms, sums, strict=True))
            metrics[f"loss_{step}"] = Counted(weighted, share_S[step])
            if len(terms) > 1:
                for term, value in zip(terms, sums, strict=True):
                    metrics[f"{term.name}_loss_{step}"] = Counted(value, share_S[step])
        return metrics
