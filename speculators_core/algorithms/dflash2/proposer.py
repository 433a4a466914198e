"""What the served draft computes, by the module that is trained."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from speculators_core.algorithms._blocks.served import (
    filled_block,
    masked_block_knobs,
    one_by_one,
    stated,
    vocabulary_logits,
)
from speculators_core.algorithms.dflash2.config import DFlash2Config
from speculators_core.algorithms.dflash2.model import DFlash2Draft
from speculators_core.types import Choose, DraftContext, ExportedDraft

_KNOBS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def served_config(draft: ExportedDraft) -> DFlash2Config:
    """The knobs that a draft states; FormatError where it is no such draft."""
    return stated(
        DFlash2Config, draft, lambda draft: masked_block_knobs(draft) | {name: draft.config[name] for name in _KNOBS}
    )


@torch.no_grad()
def draft_logits(model: nn.Module, context: DraftContext, k: int, choose: Choose) -> Tensor:
    """Scores [K, V] of one drafting step: of each slot's best tokens by the one chosen before it. See `Proposer`."""
    assert isinstance(model, DFlash2Draft)
    hidden_KH = filled_block(model, context, k)[model.knobs.first_slot :]
    unary_KV = vocabulary_logits(model, hidden_KH)
    best_KC = unary_KV.topk(model.config.selector_top_k, dim=-1)

    def scores(place: int, chosen: list[int]) -> Tensor:
        previous = torch.tensor([chosen[-1]]) if chosen else context.input_ids[-1:]
        candidates_1C = best_KC.indices[place][None]
        logits_1C = best_KC.values[place][None].float()
        scores_1C: Tensor = model.candidate_selector(logits_1C, candidates_1C, previous, hidden_KH[place][None])
        return scores_1C.new_full(unary_KV[place].shape, float("-inf")).scatter(0, candidates_1C[0], scores_1C[0])

    return one_by_one(k, choose, scores)
