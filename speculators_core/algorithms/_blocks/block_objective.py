"""Which blocks of a packed row are learned, with what weights, and how well they would be served.

Nothing is shifted: token p, its features and the verifier's state at p share a row. Link s of the block with anchor p
is asked for token p + s + 1, whose distribution the verifier states at p + s; it is drafted in slot s + 1, or in slot s
where the anchor itself drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from speculators_core.algorithms._blocks.block_draft import BlockDraft, Blocks
from speculators_core.algorithms._blocks.block_knobs import BlockKnobs
from speculators_core.algorithms._blocks.chains import (
    COMPAT_EPSILON,
    at_targets,
    by_row,
    counted_links,
    pair_targets,
    rounded_up,
)
from speculators_core.losses.fused import UnrolledLoss, UnrolledTargets, Weigh, unrolled_loss
from speculators_core.losses.terms import LossTerm
from speculators_core.types import Aligned, Batch, Counted, Sample

ROUNDING = 8
"""Multiple that the number of blocks is rounded up to, see `rounded_up`."""


def align_unshifted(sample: Sample) -> Aligned:
    """Every token with its own features and state."""
    return Aligned(
        input_ids=sample.input_ids,
        loss_mask=sample.loss_mask,
        position_ids=sample.position_ids,
        aux_TAH=sample.hidden_states[:, :-1].flatten(1),
        last_TH=sample.hidden_states[:, -1],
    )


@dataclass(frozen=True)
class LearnedBlocks:
    """Blocks that a step learns from.

    blocks: where they stand · counted_SM bool: links that count · targets_U int64: rows of the verifier's states that
    some link is asked for · rows_SU int64: the block that meets target u with link s, −1 for none.
    """

    blocks: Blocks
    counted_SM: Tensor
    targets_U: Tensor
    rows_SU: Tensor

    @property
    def count(self) -> int:
        """M, blocks that only round up included."""
        return self.blocks.anchors_M.numel()

    def by_block(self, values_SU: Tensor) -> Tensor:
        """[S, U] to [S, M]."""
        return by_row(values_SU, self.rows_SU, self.count)

    def at_targets(self, values_SM: Tensor) -> Tensor:
        """[S, M] to [S, U], zero where no block meets the target."""
        return torch.where(self.rows_SU >= 0, at_targets(values_SM, self.rows_SU), 0.0)


def possible_links(knobs: BlockKnobs, batch: Batch) -> tuple[Tensor, Tensor]:
    """bool [T] rows that may be anchors, and bool [S, T] links that count there.

    An anchor is a token that the verifier wrote, as the newest token is when a draft is served; a link counts when all
    tokens from the anchor to its own were written by the verifier, in one document. With `compat` a link counts
    wherever documents end, and anchors stay away from the row's end.
    """
    links, mask_T = knobs.drafted_tokens, batch.loss_mask.bool()
    if not knobs.compat:
        counted_ST = counted_links(mask_T, batch.document_ids, links) & mask_T
        return counted_ST[0], counted_ST
    anchors_T = mask_T.clone()
    anchors_T[-knobs.block_size :] = False
    ahead = 0 if knobs.sample_from_anchor else 1
    padded_TP = functional.pad(mask_T, (0, links + 1))
    length = mask_T.numel()
    counted_ST = torch.stack([padded_TP[link + ahead : link + ahead + length] for link in range(links)])
    return anchors_T, counted_ST & anchors_T


def expected_count(knobs: BlockKnobs, batch: Batch) -> Tensor:
    """Links that a step is expected to learn from this batch, float64 [1]: exact as long as all anchors are taken.

    The draw itself happens in the step, so that it can differ from one epoch to the next.
    """
    anchors_T, counted_ST = possible_links(knobs, batch)
    anchors = int(anchors_T.sum())
    share = min(1.0, knobs.max_anchors / anchors) if anchors else 0.0
    return (counted_ST.sum().to(torch.float64) * share)[None]


def learned_blocks(knobs: BlockKnobs, batch: Batch, *, skip: int = 0) -> LearnedBlocks:
    """Draw the blocks of a step: all possible ones, or `max_anchors` of them.

    Drawn at random while gradients are recorded, evenly spread without them, so that two validations agree.
    """
    anchors_T, counted_ST = possible_links(knobs, batch)
    candidates = anchors_T.nonzero().squeeze(1)
    count = candidates.numel()
    if count > knobs.max_anchors:
        if torch.is_grad_enabled():
            kept = torch.randperm(count, device=candidates.device)[: knobs.max_anchors]
        else:
            kept = torch.arange(knobs.max_anchors, device=candidates.device) * count // knobs.max_anchors
        anchors_T = torch.zeros_like(anchors_T)
        anchors_T[candidates[kept]] = True
    rows_M = rounded_up(anchors_T, batch.document_ids, multiple=ROUNDING)
    counted_SM = (counted_ST & anchors_T)[:, rows_M]
    targets_U, rows_SU = pair_targets(rows_M, counted_SM, batch.input_ids.numel())
    blocks = Blocks(rows_M, batch.document_ids, knobs.block_size, skip)
    return LearnedBlocks(blocks, counted_SM, targets_U, rows_SU)


def slot_weights(knobs: BlockKnobs, learned: LearnedBlocks) -> Tensor:
    """float32 [S, M]: exp(−s / gamma) where a link counts."""
    links, device = learned.counted_SM.shape[0], learned.counted_SM.device
    decay_S = torch.exp(-torch.arange(links, dtype=torch.float32, device=device) / knobs.decay_gamma)
    return decay_S[:, None] * learned.counted_SM


def chance_weights(losses_SM: Tensor, counted_SM: Tensor, alpha: float) -> Tensor:
    """D-PACE, float32 [S, M]: what a link's success is worth to the acceptance length of its block.

    With q = exp(−cross-entropy) the chance that a link is right, s = (1 − α)·q + α, the weight of link k is the sum
    over later links i ≥ k of the chance Π_{j ≤ i} s_j that serving gets there. Links that do not count are passed over.
    """
    chance_SM = torch.where(counted_SM, (1.0 - alpha) * torch.exp(-losses_SM) + alpha, 1.0)
    reached_SM = torch.cumprod(chance_SM, dim=0) * counted_SM
    return reached_SM.flip(0).cumsum(0).flip(0) * counted_SM


def weigher(knobs: BlockKnobs, learned: LearnedBlocks, denominator: Tensor) -> Weigh | None:
    """Weights that follow from the losses, divided by the denominator; None where they are fixed."""
    if knobs.position_weights != "dpace":
        return None

    def weigh(losses_SU: Tensor) -> Tensor:
        weights_SM = chance_weights(learned.by_block(losses_SU), learned.counted_SM, knobs.dpace_alpha)
        return learned.at_targets(weights_SM) / denominator

    return weigh


def guarded(knobs: BlockKnobs, denominators: Tensor, like: Tensor) -> Tensor:
    """The (global) denominator of the links, float32 scalar."""
    epsilon = COMPAT_EPSILON if knobs.compat else 0.0
    return (denominators[0].to(like.device) + epsilon).clamp_min(1e-9).to(torch.float32)


def block_loss(
    draft: BlockDraft,
    hidden_SMH: Sequence[Tensor],
    learned: LearnedBlocks,
    batch: Batch,
    denominators: Tensor,
    *,
    tail_DC: Tensor | None = None,
    terms: Sequence[LossTerm] | None = None,
    want_acceptance: bool = False,
    want_candidates: int | None = None,
) -> UnrolledLoss:
    """Σ_links weight · ℓ / denominator over the learned blocks, with the weights that the knobs ask for.

    Args:
        hidden_SMH: for each link the states [M, H] of its slot, or [M, H + C] with a tail.
        tail_DC: trained columns beside the draft's head.
        terms: in place of the knobs' own loss.
        want_acceptance: also Σ min(p, q) of each link.
        want_candidates: also that many best tokens of each link.
    """
    knobs = draft.knobs
    denominator = guarded(knobs, denominators, learned.counted_SM)
    weights_SU = learned.at_targets(slot_weights(knobs, learned)) / denominator
    return unrolled_loss(
        hidden_SMH,
        draft.lm_head.weight,
        teacher_of(draft, learned, batch, hidden_SMH[0].dtype),
        UnrolledTargets(learned.rows_SU, weights_SU),
        knobs.loss_terms if terms is None else terms,
        tail_DC=tail_DC,
        weigh=weigher(knobs, learned, denominator),
        logit_scale=draft.draft_logit_scale,
        chunk=knobs.loss_chunk,
        want_acceptance=want_acceptance,
        want_candidates=want_candidates,
    )


def teacher_of(
    draft: BlockDraft, learned: LearnedBlocks, batch: Batch, compute: torch.dtype
) -> Callable[[slice], Tensor]:
    """The verifier's logits of a slice of targets, formed when they are asked for."""
    teacher = draft.teacher
    assert teacher is not None, "the model was built without its verifier"
    return partial(_target_logits, teacher.logits, batch.last_TH[learned.targets_U], compute)


def _target_logits(
    logits: Callable[[Tensor, torch.dtype], Tensor], last_UH: Tensor, compute: torch.dtype, window: slice
) -> Tensor:
    return logits(last_UH[window], compute)


def previous_tokens(input_ids_T: Tensor, anchors_M: Tensor, links: int) -> Tensor:
    """int64 [M, S]: the row's token before the one that each link is asked for; 0 past the row's end."""
    padded_TP = functional.pad(input_ids_T, (0, links))
    return padded_TP[anchors_M[:, None] + torch.arange(links, device=anchors_M.device)]


def share_of(knobs: BlockKnobs, batch: Batch, denominators: Tensor) -> float:
    """This batch's share of the denominator: the count of loss metrics, so that pooling gives the step's loss."""
    mine = expected_count(knobs, batch).to(denominators.device)
    return float(mine[0] / denominators[0].clamp_min(1e-9))


def loss_metrics(terms: Sequence[LossTerm], outcome: UnrolledLoss, share: float) -> dict[str, Counted]:
    """`<term>_loss` of each term, unweighted, where there are several."""
    if len(terms) < 2:
        return {}
    sums_N = outcome.term_sums_SN.sum(dim=0).tolist()
    return {f"{term.name}_loss": Counted(value, share) for term, value in zip(terms, sums_N, strict=True)}


def block_metrics(knobs: BlockKnobs, correct_SM: Tensor, counted_SM: Tensor) -> dict[str, Counted]:
    """Agreement of slots with the verifier's best token.

    `full_acc` over all links · `position_k_acc` of slot k · `eal`: 1 + the leading run of right links, over blocks that
    have one: what drafting at *every* position would accept; serving lands on harder ones.
    """
    right_SM = correct_SM & counted_SM
    metrics = {"full_acc": _counted(right_SM, counted_SM)}
    for link in range(counted_SM.shape[0]):
        metrics[f"position_{link + knobs.first_slot}_acc"] = _counted(right_SM[link], counted_SM[link])
    return metrics | {"eal": accepted_length(right_SM, counted_SM)}


def chance_metrics(alpha_SM: Tensor, counted_SM: Tensor) -> dict[str, Counted]:
    """What speculative sampling would accept: `accept_rate` over links, `accept_len` over blocks that have one."""
    alpha_SM = alpha_SM * counted_SM
    return {
        "accept_rate": Counted(float(alpha_SM.sum()), float(counted_SM.sum())),
        "accept_len": accepted_length(alpha_SM, counted_SM),
    }


def accepted_length(right_SM: Tensor, counted_SM: Tensor) -> Counted:
    """1 + the leading run (or, of chances, the expected leading run) of right links, over blocks that have one."""
    blocks = float(counted_SM.any(dim=0).sum())
    run = torch.cumprod(right_SM.to(torch.float32), dim=0) * counted_SM
    return Counted(blocks + float(run.sum()), blocks)


def _counted(right: Tensor, counted: Tensor) -> Counted:
    return Counted(float(right.sum()), float(counted.sum()))


def untouched(draft: BlockDraft) -> Tensor:
    """A zero that every trained parameter belongs to: a batch without blocks must not stall a reduction over ranks."""
    return sum((p.sum() * 0.0 for p in draft.parameters() if p.requires_grad), torch.zeros(()))


def served_blocks(knobs: BlockKnobs, documents_T: Tensor, anchors_M: Tensor, k: int, *, skip: int = 0) -> Blocks:
    """Blocks as vLLM drafts k tokens: as many slots as that takes, whatever the training's block was."""
    return Blocks(anchors_M, documents_T, k + knobs.first_slot, skip)
