"""How P-EAGLE learns, and how well it would be served."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from speculators_core.algorithms._blocks.chains import COMPAT_EPSILON, TARGET_ROUNDING, align_shifted, walk_reply
from speculators_core.algorithms.peagle.config import PEagleConfig
from speculators_core.algorithms.peagle.elements import Elements, countable, draw_elements, every_depth, sizes
from speculators_core.algorithms.peagle.model import PEagleDraft
from speculators_core.losses.fused import UnrolledLoss, UnrolledTargets, unrolled_loss
from speculators_core.metrics.acceptance import unrolled_metrics
from speculators_core.types import Aligned, Batch, Counted, Sample, StepResult


class PEagleObjective:
    """One parallel pass; every sampled element weighs the same.

    After alignment row j holds token x_{j+1}, features a_j and the verifier state y_{j+1}, whose distribution predicts
    x_{j+2}. Element (a, d) is asked for x_{a+2+d}. Which elements there are, see `elements`.
    """

    def __init__(self, config: PEagleConfig) -> None:
        self.config = config

    def align(self, sample: Sample) -> Aligned:
        """Pair each token with the features of the token before it, as vLLM's proposer does."""
        return align_shifted(sample)

    def denominators(self, batch: Batch) -> Tensor:
        """Elements that are learned from, float64 [1]; their number does not depend on which are drawn."""
        return torch.tensor([sum(sizes(self.config, countable(self.config, batch)))], dtype=torch.float64)

    def step(self, model: nn.Module, batch: Batch, denominators: Tensor) -> StepResult:
        """Draw elements and learn from them, see `learn`."""
        return self.learn(model, batch, draw_elements(self.config, batch), denominators)

    def learn(self, model: nn.Module, batch: Batch, elements: Elements, denominators: Tensor) -> StepResult:
        """Σ over counted elements of ℓ / denominators[0].

        Metrics: `loss` (its count is this batch's share of the denominator), `<term>_loss` where the loss has several
        terms, `loss_k` the mean at depth k, `full_acc_k` chains right at depths 0..k among those drawn to depth k,
        `cond_acc_k` the same among those right until k − 1; without gradients also `accept_rate_k`. With `compat`
        instead `position_k_acc`, elements of depth k that are right, and `full_acc` over all depths.
        """
        assert isinstance(model, PEagleDraft)
        draft = model
        teacher, config = draft.teacher, self.config
        assert teacher is not None, "the model was built without its verifier"
        length = batch.input_ids.numel()
        positions_T = torch.arange(length, device=batch.input_ids.device) if config.compat else batch.position_ids
        hidden_SRH = draft(batch.input_ids, positions_T, batch.aux_TAH, elements)
        if not any(bool(counted.any()) for counted in elements.counted):
            # every trained parameter stays in the graph, or the reduction over ranks would wait for it
            touched = [*hidden_SRH, *((draft.lm_head.weight,) if draft.lm_head.weight.requires_grad else ())]
            return StepResult(torch.stack([tensor.float().sum() for tensor in touched]).sum() * 0.0, {})
        denominator = float(denominators[0])
        targets_U, rows_SU = _targets(elements, length)
        weight = 1.0 / (denominator + (COMPAT_EPSILON if config.compat else 0.0))
        last_UH = batch.last_TH[targets_U]
        compute = hidden_SRH[0].dtype
        outcome = unrolled_loss(
            hidden_SRH,
            draft.lm_head.weight,
            lambda window: teacher.logits(last_UH[window], compute),
            UnrolledTargets(rows_SU, (rows_SU >= 0).float() * weight),
            config.loss_terms,
            logit_scale=draft.draft_logit_scale,
            chunk=config.loss_chunk,
            want_acceptance=not torch.is_grad_enabled() and not config.compat,
        )
        metrics = self._losses(outcome, rows_SU, weight, denominator)
        correct_ST = _by_anchor(outcome.correct_SU, targets_U, rows_SU, length)
        counted_ST = _by_anchor(rows_SU >= 0, targets_U, rows_SU, length)
        if config.compat:
            return StepResult(outcome.loss, metrics | _positions(correct_ST, counted_ST))
        chains = unrolled_metrics(correct_ST, counted_ST)
        del chains["eal"]  # chains end where the draw ended them, not where the reply does
        if outcome.acceptance_SU is not None:
            for depth, (alpha_U, rows_U) in enumerate(zip(outcome.acceptance_SU, rows_SU, strict=True)):
                metrics[f"accept_rate_{depth}"] = Counted(float(alpha_U[rows_U >= 0].sum()), float((rows_U >= 0).sum()))
        return StepResult(outcome.loss, metrics | chains)

    def walk(self, model: nn.Module, aligned: Aligned, k: int) -> Sequence[int]:
        """Accepted drafts at each drafting point of the replies in one row, see `walk_reply`.

        Serving drafts k tokens in one pass: the real row's, and those of k − 1 masked rows behind it.
        """
        assert isinstance(model, PEagleDraft)
        draft = model

        def propose(row: Aligned, documents_T: Tensor, rows_R: Tensor) -> Sequence[Tensor]:
            hidden_SRH: list[Tensor] = draft(
                row.input_ids, row.position_ids, row.aux_TAH, every_depth(rows_R, documents_T, k)
            )
            return hidden_SRH

        return walk_reply(aligned, k, propose, draft.d2t, draft.lm_head.weight, self.config.loss_chunk)

    def _losses(self, outcome: UnrolledLoss, rows_SU: Tensor, weight: float, denominator: float) -> dict[str, Counted]:
        terms = self.config.loss_terms
        numbers = (rows_SU >= 0).sum(dim=1).tolist()
        share = sum(numbers) / max(denominator, 1e-9)
        metrics = {"loss": Counted(float(outcome.loss.detach()), share)}
        if len(terms) > 1:
            for term, value in zip(terms, outcome.term_sums_SN.sum(dim=0).tolist(), strict=True):
                metrics[f"{term.name}_loss"] = Counted(value, share)
        if not self.config.compat:
            for depth, (sums, number) in enumerate(zip(outcome.term_sums_SN.tolist(), numbers, strict=True)):
                weighted = sum(term.weight * value for term, value in zip(terms, sums, strict=True))
                metrics[f"loss_{depth}"] = Counted(weighted / weight, float(number))
        return metrics


def _targets(elements: Elements, length: int) -> tuple[Tensor, Tensor]:
    """Targets [U] that counted elements are asked for, and for each depth the element's row ([S, U], −1 for none).

    U is rounded up with targets that nobody is asked for.
    """
    depths = len(elements.anchors)
    row_of_ST = torch.full((depths, length + depths), -1, dtype=torch.int64, device=elements.document_ids_T.device)
    for depth, (anchors, counted) in enumerate(zip(elements.anchors, elements.counted, strict=True)):
        numbers = torch.arange(anchors.numel(), device=anchors.device)
        row_of_ST[depth, anchors + depth] = torch.where(counted, numbers, -1)
    row_of_ST = row_of_ST[:, :length]
    asked_T = (row_of_ST >= 0).any(dim=0)
    targets_U = asked_T.nonzero().squeeze(1)
    others = (~asked_T).nonzero().squeeze(1)[: -targets_U.numel() % TARGET_ROUNDING]
    targets_U = torch.cat([targets_U, others])
    return targets_U, row_of_ST[:, targets_U]


def _by_anchor(values_SU: Tensor, targets_U: Tensor, rows_SU: Tensor, length: int) -> Tensor:
    """bool [S, U] by target to [S, T] by anchor."""
    out = torch.zeros(values_SU.shape[0], length, dtype=torch.bool, device=values_SU.device)
    for depth, (values_U, rows_U) in enumerate(zip(values_SU, rows_SU, strict=True)):
        there = rows_U >= 0
        out[depth, targets_U[there] - depth] = values_U[there]
    return out


def _positions(correct_ST: Tensor, counted_ST: Tensor) -> dict[str, Counted]:
    """speculators 0.9's counts: every element by itself."""
    hits, numbers = correct_ST.sum(dim=1).tolist(), counted_ST.sum(dim=1).tolist()
    found = {f"position_{depth}_acc": Counted(hits[depth], numbers[depth]) for depth in range(len(hits))}
    return {"full_acc": Counted(float(sum(hits)), float(sum(numbers))), **found}
