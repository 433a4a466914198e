"""How XPress learns, and how well it would be served."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from speculators_core.algorithms._blocks.block_draft import Blocks
from speculators_core.algorithms._blocks.block_objective import (
    LearnedBlocks,
    align_unshifted,
    block_metrics,
    chance_weights,
    expected_count,
    guarded,
    learned_blocks,
    share_of,
    slot_weights,
    teacher_of,
    untouched,
)
from speculators_core.algorithms._blocks.chains import walk_chains
from speculators_core.algorithms.xpress.config import XPressConfig
from speculators_core.algorithms.xpress.model import XPressDraft
from speculators_core.losses.fused import UnrolledLoss, UnrolledTargets, unrolled_loss
from speculators_core.types import Aligned, Batch, Counted, Sample, StepResult


class XPressObjective:
    """Three ways to read the same blocks: refined by the text's own tokens, by free-running rounds, and not at all.

    Each way is a variant of every link: the same states, another bias. All variants meet the verifier's distributions
    in one pass over the targets.
    """

    def __init__(self, config: XPressConfig) -> None:
        self.config = config

    def align(self, sample: Sample) -> Aligned:
        """Nothing is shifted: a block reads the features before its anchor."""
        return align_unshifted(sample)

    def denominators(self, batch: Batch) -> Tensor:
        """Links that are learned, float64 [1]."""
        return expected_count(self.config, batch)

    def step(self, model: nn.Module, batch: Batch, denominators: Tensor) -> StepResult:
        """L(refined by the text) + consistency_weight · mean L(rounds) + base_anchor_weight · L(unrefined).

        Metrics: `loss`, `tf_loss`, `consistency_loss`, `consistency_roundJ_loss`, `base_anchor_loss`, `<term>_loss` of
        the first, `accept_rate`, `base_accept_rate`, `accuracy` against the text (against the verifier's best token
        where the vocabulary is reduced), and, when not `compat`, those of `block_metrics` of the first.
        """
        assert isinstance(model, XPressDraft)
        draft, config = model, self.config
        learned = learned_blocks(config, batch)
        if learned.count == 0:
            return StepResult(untouched(draft), {})
        hidden_MBH = draft(batch.input_ids, batch.position_ids, batch.aux_TAH, learned.blocks)
        biases = self._biases(draft, hidden_MBH, batch, learned)
        outcome = self._loss(draft, hidden_MBH, biases, learned, batch, denominators)
        share = share_of(config, batch, denominators)
        metrics = self._losses(outcome, len(biases), share)
        return StepResult(outcome.loss, metrics | self._agreement(outcome, learned, batch))

    @property
    def _has_base(self) -> bool:
        """Whether the last variant is the unrefined one."""
        return self.config.base_anchor_weight > 0

    def _biases(self, draft: XPressDraft, hidden_MBH: Tensor, batch: Batch, learned: LearnedBlocks) -> list[Tensor]:
        """u [M, B, r] of every variant: refined by the text, by each free-running round, and not at all."""
        known_MB = draft.known_tokens(batch.input_ids, batch.document_ids, learned.blocks.anchors_M)
        states = draft.refiner_head.states(hidden_MBH)
        previous = [known_MB]
        if self.config.consistency_weight > 0:
            rounds = draft.rounds(hidden_MBH, known_MB, self.config.consistency_passes, self.config.loss_chunk)
            previous += rounds[:-1]
        biases = [draft.refiner_head(states, tokens_MB) for tokens_MB in previous]
        return [*biases, torch.zeros_like(biases[0])] if self._has_base else biases

    def _loss(
        self,
        draft: XPressDraft,
        hidden_MBH: Tensor,
        biases: Sequence[Tensor],
        learned: LearnedBlocks,
        batch: Batch,
        denominators: Tensor,
    ) -> UnrolledLoss:
        config, variants = self.config, len(biases)
        links = config.drafted_tokens
        states: list[Tensor] = []
        for bias in biases:
            joined = torch.cat((hidden_MBH, bias.to(hidden_MBH.dtype)), dim=-1)
            states += joined.unbind(1)[config.first_slot :]
        coefficients = self._coefficients(variants)
        denominator = guarded(config, denominators, learned.counted_SM)
        fixed_SU = learned.at_targets(slot_weights(config, learned)) / denominator
        plain_SU = learned.at_targets(learned.counted_SM.float()) / denominator
        weights = [fixed_SU * coefficient for coefficient in coefficients]
        unweighted = variants - 1 if self._has_base and config.base_anchor_full_weight else -1
        if unweighted >= 0:
            weights[unweighted] = plain_SU * coefficients[unweighted]

        def weigh(losses_VU: Tensor) -> Tensor:
            found = []
            for number, losses_SU in enumerate(losses_VU.view(variants, links, -1)):
                if number == unweighted:
                    found.append(weights[number])
                    continue
                chance_SM = chance_weights(learned.by_block(losses_SU), learned.counted_SM, config.dpace_alpha)
                found.append(learned.at_targets(chance_SM) / denominator * coefficients[number])
            return torch.cat(found)

        hard_U = functional.pad(batch.input_ids, (0, 1))[learned.targets_U + 1] if config.ce_from_data else None
        return unrolled_loss(
            states,
            draft.lm_head.weight,
            teacher_of(draft, learned, batch, hidden_MBH.dtype),
            UnrolledTargets(learned.rows_SU.repeat(variants, 1), torch.cat(weights), hard_U),
            config.loss_terms,
            tail_DC=draft.refiner_head.readout.weight,
            weigh=weigh if config.position_weights == "dpace" else None,
            variants=variants,
            logit_scale=draft.draft_logit_scale,
            chunk=config.loss_chunk,
            want_acceptance=True,
            want_candidates=1 if draft.vocabulary is None else None,
        )

    def _coefficients(self, variants: int) -> list[float]:
        base = [self.config.base_anchor_weight] if self._has_base else []
        rounds = variants - 1 - len(base)
        each = self.config.consistency_weight / rounds if rounds else 0.0
        return [1.0, *[each] * rounds, *base]

    def _losses(self, outcome: UnrolledLoss, variants: int, share: float) -> dict[str, Counted]:
        """Every variant's loss without its coefficient."""
        terms = self.config.loss_terms
        coefficients = outcome.term_sums_SN.new_tensor(self._coefficients(variants))
        sums_VN = outcome.term_sums_SN.view(variants, self.config.drafted_tokens, -1).sum(dim=1)
        sums_VN = sums_VN / coefficients[:, None]
        losses_V = (sums_VN @ sums_VN.new_tensor([term.weight for term in terms])).tolist()
        metrics = {"loss": Counted(float(outcome.loss.detach()), share), "tf_loss": Counted(losses_V[0], share)}
        rounds = losses_V[1:-1] if self._has_base else losses_V[1:]
        if rounds:
            metrics["consistency_loss"] = Counted(sum(rounds) / len(rounds), share)
            metrics |= {f"consistency_round{n}_loss": Counted(value, share) for n, value in enumerate(rounds)}
        if self._has_base:
            metrics["base_anchor_loss"] = Counted(losses_V[-1], share)
        if len(terms) > 1:
            values = zip(terms, sums_VN[0].tolist(), strict=True)
            metrics |= {f"{term.name}_loss": Counted(value, share) for term, value in values}
        return metrics

    def _agreement(self, outcome: UnrolledLoss, learned: LearnedBlocks, batch: Batch) -> dict[str, Counted]:
        assert outcome.acceptance_SU is not None
        links, counted_SM = self.config.drafted_tokens, learned.counted_SM
        count = float(counted_SM.sum())
        correct_SM = learned.by_block(outcome.correct_SU[:links])
        right_SM = correct_SM
        if outcome.candidates is not None:
            next_U = functional.pad(batch.input_ids, (0, 1))[learned.targets_U + 1]
            right_SM = learned.by_block(outcome.candidates.best_SUK[:links, :, 0] == next_U)
        refined_SM = learned.by_block(outcome.acceptance_SU[:links]) * counted_SM
        metrics = {
            "accept_rate": Counted(float(refined_SM.sum()), count),
            "accuracy": Counted(float((right_SM & counted_SM).sum()), count),
        }
        if self._has_base:
            base_SM = learned.by_block(outcome.acceptance_SU[-links:]) * counted_SM
            metrics["base_accept_rate"] = Counted(float(base_SM.sum()), count)
        return metrics if self.config.compat else metrics | block_metrics(self.config, correct_SM, counted_SM)

    def walk(self, model: nn.Module, aligned: Aligned, k: int) -> Sequence[int]:
        """Accepted drafts at each drafting point of the replies in one row, see `walk_chains`.

        A block is refined in `num_jacobi_passes` rounds from its own tokens, as it would be served; at most k of the
        tokens that it then holds are proposed.
        """
        assert isinstance(model, XPressDraft)
        draft, config = model, self.config

        def propose(row: Aligned, documents_T: Tensor, anchors_M: Tensor) -> Sequence[Tensor]:
            blocks = Blocks(anchors_M, documents_T, config.block_size)
            hidden_MBH = draft(row.input_ids, row.position_ids, row.aux_TAH, blocks)
            known_MB = draft.known_tokens(row.input_ids, documents_T, anchors_M)
            final_MB = draft.rounds(hidden_MBH, known_MB, config.num_jacobi_passes, config.loss_chunk)[-1]
            return final_MB.unbind(1)[config.first_slot :][:k]

        return walk_chains(aligned, k, propose)
