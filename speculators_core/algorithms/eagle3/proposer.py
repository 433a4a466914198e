"""What the served draft computes, by the module that is trained."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from speculators_core.algorithms._blocks.served import feature_knobs, stated, unrolled, vocabulary_logits
from speculators_core.algorithms._blocks.unrolled import Drafting
from speculators_core.algorithms.eagle3.config import Eagle3Config
from speculators_core.algorithms.eagle3.model import Eagle3Draft
from speculators_core.types import Choose, DraftContext, ExportedDraft


def served_config(draft: ExportedDraft) -> Eagle3Config:
    """The knobs that a draft states; FormatError where it is no such draft."""
    return stated(
        Eagle3Config, draft, lambda draft: {**feature_knobs(draft), "norm_output": draft.config["norm_output"]}
    )


@torch.no_grad()
def draft_logits(model: nn.Module, context: DraftContext, k: int, choose: Choose) -> Tensor:
    """Logits [K, V] of one drafting step, each token fed to the next. See `Proposer`."""
    assert isinstance(model, Eagle3Draft)
    length = context.input_ids.numel()
    drafting = Drafting(torch.tensor([length - 1]), torch.zeros(length, dtype=torch.int64))
    aux_TAH = context.aux_TAH.to(model.fc.weight.dtype)
    return unrolled(
        k,
        choose,
        lambda normed_RH: vocabulary_logits(model, normed_RH),
        lambda go_on: model(context.input_ids, torch.arange(length), aux_TAH, drafting, k, go_on),
    )
