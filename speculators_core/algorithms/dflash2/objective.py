"""How DFlash2 learns, and how well it would be served."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from speculators_core.algorithms._blocks.block_objective import (
    LearnedBlocks,
    accepted_length,
    align_unshifted,
    block_loss,
    block_metrics,
    chance_metrics,
    chance_weights,
    expected_count,
    guarded,
    learned_blocks,
    loss_metrics,
    previous_tokens,
    served_blocks,
    share_of,
    slot_weights,
    untouched,
)
from speculators_core.algorithms._blocks.chains import walk_chains
from speculators_core.algorithms._blocks.selector import candidate_logits, with_target
from speculators_core.algorithms.dflash2.config import DFlash2Config
from speculators_core.algorithms.dflash2.model import DFlash2Draft
from speculators_core.losses.fused import Candidates
from speculators_core.types import Aligned, Batch, Counted, Sample, StepResult


class DFlash2Objective:
    """Blocks held against the verifier's distributions; the selector learns to pick its choice among the best."""

    def __init__(self, config: DFlash2Config) -> None:
        self.config = config

    def align(self, sample: Sample) -> Aligned:
        """Nothing is shifted: a block reads the features before its anchor."""
        return align_unshifted(sample)

    def denominators(self, batch: Batch) -> Tensor:
        """Links that are learned, float64 [1]."""
        return expected_count(self.config, batch)

    def step(self, model: nn.Module, batch: Batch, denominators: Tensor) -> StepResult:
        """Σ weight · ℓ / denominator over the slots of the drawn blocks, plus the selector's cross-entropy.

        Metrics: those of the blocks by their logits alone (`block_metrics`, `chance_metrics`), but `eal` by what the
        selector picks; `loss`, `unary_loss`, `selector_loss`, `<term>_loss` where there are several; and of the K
        candidates `unary_candidate_recall_at_K`, `unary_candidate_target_mass_at_K`, `teacher_forced_selector_acc`
        and `unary_top_K_oracle_accepted_length`.
        """
        assert isinstance(model, DFlash2Draft)
        draft, config = model, self.config
        learned = learned_blocks(config, batch, skip=config.first_slot)
        if learned.count == 0:
            return StepResult(untouched(draft), {})
        hidden_MSH = draft(batch.input_ids, batch.position_ids, batch.aux_TAH, learned.blocks)
        unary = block_loss(
            draft,
            hidden_MSH.unbind(1),
            learned,
            batch,
            denominators,
            want_acceptance=True,
            want_candidates=config.selector_top_k,
        )
        assert unary.candidates is not None and unary.acceptance_SU is not None
        previous_MS = previous_tokens(batch.input_ids, learned.blocks.anchors_M, config.drafted_tokens)
        losses_N, picks_N, present_N = self._select(draft, hidden_MSH, previous_MS, learned, unary.candidates)
        counted_SM = learned.counted_SM
        losses_SM = _spread(losses_N, counted_SM)
        if config.position_weights == "dpace":
            weights_SM = chance_weights(losses_SM.detach(), counted_SM, config.dpace_alpha)
        else:
            weights_SM = slot_weights(config, learned)
        selector_loss = (losses_SM * weights_SM).sum() / guarded(config, denominators, counted_SM)
        loss = unary.loss + config.selector_loss_alpha * selector_loss
        share = share_of(config, batch, denominators)
        metrics = {
            "loss": Counted(float(loss.detach()), share),
            "unary_loss": Counted(float(unary.loss.detach()), share),
            "selector_loss": Counted(float(selector_loss.detach()), share),
        }
        metrics |= loss_metrics(config.loss_terms, unary, share)
        metrics |= chance_metrics(learned.by_block(unary.acceptance_SU), counted_SM)
        metrics |= block_metrics(config, learned.by_block(unary.correct_SU), counted_SM)
        metrics |= self._candidate_metrics(learned, unary.candidates, picks_N, present_N)
        return StepResult(loss, metrics)

    def _select(
        self,
        draft: DFlash2Draft,
        hidden_MSH: Tensor,
        previous_MS: Tensor,
        learned: LearnedBlocks,
        found: Candidates,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of the N links that count: cross-entropy of the selector, whether it picks the target, whether it can.

        Links are taken by step, then by block, as `counted_SM` has them.
        """
        losses, picks, present = [], [], []
        for link, blocks in enumerate(learned.counted_SM):
            rows = blocks.nonzero().squeeze(1)
            place_M = torch.zeros(learned.count, dtype=torch.int64, device=rows.device)
            met_U = learned.rows_SU[link] >= 0
            place_M[learned.rows_SU[link][met_U]] = met_U.nonzero().squeeze(1)
            places = place_M[rows]
            for part, at in zip(
                torch.split(rows, self.config.loss_chunk), torch.split(places, self.config.loss_chunk), strict=True
            ):
                hidden_NH, previous_N = hidden_MSH[part, link], previous_MS[part, link]
                target_N = found.target_U[at]
                candidates_NK, place_N, present_N = with_target(found.best_SUK[link, at], target_N)
                logits_NK = candidate_logits(hidden_NH, draft.lm_head.weight, candidates_NK)
                scores_NK = draft.candidate_selector(logits_NK, candidates_NK, previous_N, hidden_NH)
                losses.append(functional.cross_entropy(scores_NK, place_N, reduction="none"))
                picks.append(scores_NK.detach().argmax(dim=-1) == place_N)
                present.append(present_N)
        return torch.cat(losses), torch.cat(picks), torch.cat(present)

    def _candidate_metrics(
        self, learned: LearnedBlocks, found: Candidates, picks_N: Tensor, present_N: Tensor
    ) -> dict[str, Counted]:
        counted_SM, k = learned.counted_SM, self.config.selector_top_k
        links, present = float(counted_SM.sum()), float(present_N.sum())
        # speculators 0.9 overlooks slot 0 here, even where it drafts
        overlooked = 1 if self.config.compat and self.config.sample_from_anchor else 0
        # the candidates of training hold the target, in the last one's place where it is not among the best
        held_SU = (found.best_SUK == found.target_U[:, None]).any(dim=-1)
        mass_SU = found.mass_SUK[..., :-1].sum(dim=-1)
        mass_SU += torch.where(held_SU, found.mass_SUK[..., -1], found.target_mass_U)
        mass_SM = learned.by_block(mass_SU) * counted_SM
        return {
            f"unary_candidate_recall_at_{k}": Counted(present, links),
            f"unary_candidate_target_mass_at_{k}": Counted(float(mass_SM.sum()), links),
            "teacher_forced_selector_acc": Counted(float((picks_N & present_N).sum()), present),
            "eal": accepted_length(_spread(picks_N & present_N, counted_SM), counted_SM),
            f"unary_top_{k}_oracle_accepted_length": accepted_length(
                _spread(present_N, counted_SM)[overlooked:], counted_SM[overlooked:]
            ),
        }

    def walk(self, model: nn.Module, aligned: Aligned, k: int) -> Sequence[int]:
        """Accepted drafts at each drafting point of the replies in one row, see `walk_chains`.

        Until a rejection the token before each slot is the reply's, so the selector picks for all slots at once.
        """
        assert isinstance(model, DFlash2Draft)
        draft, config = model, self.config

        def propose(row: Aligned, documents_T: Tensor, anchors_M: Tensor) -> Sequence[Tensor]:
            blocks = served_blocks(config, documents_T, anchors_M, k, skip=config.first_slot)
            hidden_MSH = draft(row.input_ids, row.position_ids, row.aux_TAH, blocks)
            previous_MS = previous_tokens(row.input_ids, anchors_M, k)
            return [self._pick(draft, hidden_MSH[:, link], previous_MS[:, link]) for link in range(k)]

        return walk_chains(aligned, k, propose)

    def _pick(self, draft: DFlash2Draft, hidden_MH: Tensor, previous_M: Tensor) -> Tensor:
        """The selector's choice [M] among the best tokens of one slot of every block."""
        head_DH = draft.lm_head.weight.to(hidden_MH.dtype)
        picked = []
        for hidden_NH, previous_N in zip(
            torch.split(hidden_MH, self.config.loss_chunk), torch.split(previous_M, self.config.loss_chunk), strict=True
        ):
            logits_NK, best_NK = torch.topk(hidden_NH @ head_DH.T, self.config.selector_top_k, dim=-1)
            scores_NK = draft.candidate_selector(logits_NK.float(), best_NK, previous_N, hidden_NH)
            picked.append(best_NK.gather(1, scores_NK.argmax(dim=-1, keepdim=True)).squeeze(1))
        return torch.cat(picked)


def _spread(values_N: Tensor, counted_SM: Tensor) -> Tensor:
    """Values of the links that count, back in their places [S, M]; zero elsewhere."""
    out = torch.zeros(counted_SM.shape, dtype=values_N.dtype, device=values_N.device)
    return out.masked_scatter(counted_SM, values_N)
