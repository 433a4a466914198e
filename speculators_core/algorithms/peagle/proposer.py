"""What the served draft computes, by the module that is trained."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from speculators_core.algorithms._blocks.served import all_at_once, feature_knobs, stated, vocabulary_logits
from speculators_core.algorithms.peagle.config import PEagleConfig
from speculators_core.algorithms.peagle.elements import every_depth
from speculators_core.algorithms.peagle.model import PEagleDraft
from speculators_core.types import Choose, DraftContext, ExportedDraft


def served_config(draft: ExportedDraft) -> PEagleConfig:
    """The knobs that a draft states; FormatError where it is no such draft."""

    def read(draft: ExportedDraft) -> dict[str, object]:
        knobs = feature_knobs(draft)
        return {**knobs, "num_depths": knobs["speculative_tokens"], "mask_token_id": draft.config["mask_token_id"]}

    return stated(PEagleConfig, draft, read)


@torch.no_grad()
def draft_logits(model: nn.Module, context: DraftContext, k: int, choose: Choose) -> Tensor:
    """Logits [K, V] of one drafting step: the newest row's, and those of K − 1 masked rows. See `Proposer`."""
    assert isinstance(model, PEagleDraft)
    length = context.input_ids.numel()
    documents_T = torch.zeros(length, dtype=torch.int64)
    hidden_SRH = model(
        context.input_ids,
        torch.arange(length),
        context.aux_TAH.to(model.fc.weight.dtype),
        every_depth(torch.tensor([length - 1]), documents_T, k),
    )
    return all_at_once(vocabulary_logits(model, torch.cat(hidden_SRH)), choose)
