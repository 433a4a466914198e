"""What a stitched head computes when it is served, by the module that is trained."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from speculators_core.algorithms._blocks.served import stated, stated_tokens, unrolled
from speculators_core.algorithms._blocks.unrolled import Drafting
from speculators_core.algorithms.mtp.config import MTPConfig
from speculators_core.algorithms.mtp.model import MTPHead
from speculators_core.types import Choose, DraftContext, ExportedDraft


def served_config(draft: ExportedDraft) -> MTPConfig:
    """The knobs that a draft states; FormatError where it is no such draft."""
    return stated(MTPConfig, draft, lambda draft: {"num_speculative_steps": stated_tokens(draft)})


@torch.no_grad()
def draft_logits(model: nn.Module, context: DraftContext, k: int, choose: Choose) -> Tensor:
    """Logits [K, V] of one drafting step, each token fed to the next. See `Proposer`."""
    assert isinstance(model, MTPHead) and model.teacher is not None
    length, scale = context.input_ids.numel(), model.teacher.scale
    drafting = Drafting(torch.tensor([length - 1]), torch.zeros(length, dtype=torch.int64))
    head_VH = model.lm_head.weight
    state_TH = model.fed(context.aux_TAH.to(model.input_proj.weight.dtype))
    return unrolled(
        k,
        choose,
        lambda normed_RH: normed_RH @ head_VH.to(normed_RH.dtype).T * scale,
        lambda go_on: model(context.input_ids, torch.arange(length), state_TH, drafting, k, go_on),
    )
