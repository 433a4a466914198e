"""How a native head learns, and how well it would be served."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from speculators_core.algorithms._blocks.attention import plan_attention
from speculators_core.algorithms._blocks.chains import (
    by_row,
    counted_links,
    pair_targets,
    rounded_up,
    walk_reply,
)
from speculators_core.algorithms._blocks.unrolled import Drafting
from speculators_core.algorithms.mtp.config import MTPConfig
from speculators_core.algorithms.mtp.model import MTPHead
from speculators_core.losses.fused import UnrolledTargets, unrolled_loss
from speculators_core.losses.terms import LossTerm
from speculators_core.metrics.acceptance import unrolled_metrics
from speculators_core.types import Aligned, Batch, Counted, Sample, StepResult


class MTPObjective:
    """Teacher-forced unroll of the head, each step fed by the one before.

    After alignment row j holds token x_{j+1}, as its one feature the verifier's last state y_j, and beside it y_{j+1},
    whose distribution predicts x_{j+2}. Step s of row j is asked for x_{j+2+s}. It counts when every token that the
    chain has drafted by then was written by the verifier and lies in the same document.

    With `compat` every step runs over the same window of the packed row at the same positions, learns the data's own
    tokens, and is fed the state before the final norm; documents are told apart by their positions.
    """

    def __init__(self, config: MTPConfig) -> None:
        self.config = config

    def align(self, sample: Sample) -> Aligned:
        """Pair each token with the state of the token before it, as vLLM's proposer does."""
        return Aligned(
            input_ids=sample.input_ids[1:],
            loss_mask=sample.loss_mask[1:],
            position_ids=sample.position_ids[:-1],
            aux_TAH=sample.hidden_states[:-1, -1],
            last_TH=sample.hidden_states[1:, -1],
        )

    def denominators(self, batch: Batch) -> Tensor:
        """Counted rows of each step, float64 [S]."""
        return self._counted(batch).sum(dim=1).to(torch.float64)

    def step(self, model: nn.Module, batch: Batch, denominators: Tensor) -> StepResult:
        """Σ_s weight_s · Σ_j ℓ(s, j) / denominators[s], with the acceptance of every step.

        Metrics: `loss`, `loss_k`, `full_acc_k`, `cond_acc_k`, `eal` (over all positions); without gradients also
        `accept_rate_k`. With `compat` `loss` and `loss_step_k` alone, the weighted losses of the steps.
        """
        assert isinstance(model, MTPHead)
        head = model
        config, steps = self.config, self.config.num_speculative_steps
        counted_ST = self._counted(batch)
        rows_R = self._window(batch) if config.compat else rounded_up(counted_ST.any(dim=0), batch.document_ids)
        hidden_SRH = self._states(head, batch, rows_R)
        if not bool(counted_ST.any()):  # every trained parameter stays in the graph
            return StepResult(torch.stack([hidden.float().sum() for hidden in hidden_SRH]).sum() * 0.0, {})
        denominators_S = denominators.to(counted_ST.device, torch.float64).clamp_min(1e-9)
        weight_S = torch.tensor(config.step_weights, dtype=torch.float64, device=counted_ST.device) / denominators_S
        targets_U, rows_SU = pair_targets(rows_R, counted_ST[:, rows_R], batch.input_ids.numel())
        weights_SU = torch.where(rows_SU >= 0, weight_S.float()[:, None], 0.0)
        compute = hidden_SRH[0].dtype
        outcome = unrolled_loss(
            hidden_SRH,
            head.lm_head.weight,
            lambda window: self._target_logits(head, batch, targets_U[window], compute),
            UnrolledTargets(rows_SU, weights_SU),
            (LossTerm("ce", 1.0),) if config.compat else config.loss_terms,
            logit_scale=1.0 if head.teacher is None else head.teacher.scale,
            chunk=config.loss_chunk,
            want_acceptance=not torch.is_grad_enabled() and not config.compat,
        )
        terms = [1.0] if config.compat else [term.weight for term in config.loss_terms]
        sums_S = (outcome.term_sums_SN @ outcome.term_sums_SN.new_tensor(terms)).tolist()
        share_S = (counted_ST.sum(dim=1) / denominators_S).tolist()
        if config.compat:
            losses = {"loss": Counted(float(outcome.loss.detach()), 1.0)}
            return StepResult(
                outcome.loss, losses | {f"loss_step_{step}": Counted(total, 1.0) for step, total in enumerate(sums_S)}
            )
        metrics = {"loss": Counted(float(outcome.loss.detach()), share_S[0])}
        metrics |= {f"loss_{step}": Counted(sums_S[step], share_S[step]) for step in range(steps)}
        correct_SR = by_row(outcome.correct_SU, rows_SU, rows_R.numel())
        metrics |= unrolled_metrics(correct_SR, counted_ST[:, rows_R])
        if outcome.acceptance_SU is not None:
            alpha_SR = by_row(outcome.acceptance_SU, rows_SU, rows_R.numel())
            for step in range(steps):
                chosen = counted_ST[step, rows_R]
                metrics[f"accept_rate_{step}"] = Counted(float(alpha_SR[step][chosen].sum()), float(chosen.sum()))
        return StepResult(outcome.loss, metrics)

    def walk(self, model: nn.Module, aligned: Aligned, k: int) -> Sequence[int]:
        """Accepted drafts at each drafting point of the replies in one row, see `walk_reply`."""
        assert isinstance(model, MTPHead)
        head = model

        def states(row: Aligned, documents_T: Tensor, rows_R: Tensor) -> Sequence[Tensor]:
            hidden_SRH: list[Tensor] = head(
                row.input_ids, row.position_ids, head.fed(row.aux_TAH), Drafting(rows_R, documents_T), k
            )
            return hidden_SRH

        return walk_reply(aligned, k, states, None, head.lm_head.weight, self.config.loss_chunk)

    def _counted(self, batch: Batch) -> Tensor:
        """bool [S, T]: which rows count at which step."""
        steps, mask = self.config.num_speculative_steps, batch.loss_mask.bool()
        if not self.config.compat:
            return counted_links(mask, batch.document_ids, steps)
        counted = torch.zeros(steps, mask.numel(), dtype=torch.bool, device=mask.device)
        window = self._window(batch).numel()
        for step in range(steps):
            counted[step, :window] = mask[step + 1 : step + 1 + window]
        return counted

    def _window(self, batch: Batch) -> Tensor:
        """speculators 0.9's rows: those that have a token to learn at the last step too."""
        length = batch.input_ids.numel()
        return torch.arange(max(0, length - self.config.num_speculative_steps), device=batch.input_ids.device)

    def _states(self, head: MTPHead, batch: Batch, rows_R: Tensor) -> list[Tensor]:
        steps = self.config.num_speculative_steps
        if not self.config.compat:
            drafting = Drafting(rows_R, batch.document_ids)
            states: list[Tensor] = head(batch.input_ids, batch.position_ids, head.fed(batch.aux_TAH), drafting, steps)
            return states
        window = rows_R.numel()
        positions = batch.position_ids[:window]
        resets = torch.cat([positions.new_zeros(1), (positions[1:] != positions[:-1] + 1).long()])
        plan = plan_attention(resets.cumsum(0), None, None)
        tokens = [batch.input_ids[step : step + window] for step in range(steps)]
        return head.anew(tokens, positions, batch.aux_TAH[:window], plan)

    def _target_logits(self, head: MTPHead, batch: Batch, targets_u: Tensor, compute: torch.dtype) -> Tensor:
        """The verifier's logits float32 [u, V] at some rows; with `compat` certainty of the data's own token."""
        if not self.config.compat:
            assert head.teacher is not None, "the head was built without its verifier"
            return head.teacher.logits(batch.last_TH[targets_u], compute)
        following_u = (targets_u + 1).clamp_max(batch.input_ids.numel() - 1)
        certain_uV = torch.zeros(targets_u.numel(), head.lm_head.weight.shape[0], device=targets_u.device)
        return certain_uV.scatter_(1, batch.input_ids[following_u][:, None], 1.0)
