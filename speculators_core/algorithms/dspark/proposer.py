"""What the served draft computes, by the module that is trained."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from speculators_core.algorithms._blocks.served import block_knobs, filled_block, one_by_one, stated, vocabulary_logits
from speculators_core.algorithms.dspark.config import DSparkConfig
from speculators_core.algorithms.dspark.model import DSparkDraft
from speculators_core.types import Choose, DraftContext, ExportedDraft

_KNOBS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")


def served_config(draft: ExportedDraft) -> DSparkConfig:
    """The knobs that a draft states; FormatError where it is no such draft."""
    return stated(DSparkConfig, draft, lambda draft: block_knobs(draft) | {name: draft.config[name] for name in _KNOBS})


@torch.no_grad()
def draft_logits(model: nn.Module, context: DraftContext, k: int, choose: Choose) -> Tensor:
    """Logits [K, V] of one drafting step, each corrected by the tokens chosen before it. See `Proposer`."""
    assert isinstance(model, DSparkDraft)
    hidden_BH, first, head = filled_block(model, context, k), model.knobs.first_slot, model.markov_head
    anchor = int(context.input_ids[-1])

    def corrected(place: int, chosen: list[int]) -> Tensor:
        slot = place + first
        bias_1D = None
        if head is not None:
            # the token before each slot: the anchor stands before the first that drafts, and in its own slot
            previous_1B = torch.tensor([[*[anchor] * (first + 1), *chosen]])
            hidden_1BH = hidden_BH[None, : slot + 1]
            factors_1Br = head(head.embed(previous_1B).to(hidden_1BH.dtype), hidden_1BH)
            bias_1D = factors_1Br[:, slot] @ head.markov_w2.weight.to(factors_1Br.dtype).T
        return vocabulary_logits(model, hidden_BH[slot][None], bias_1D)[0]

    return one_by_one(k, choose, corrected)
