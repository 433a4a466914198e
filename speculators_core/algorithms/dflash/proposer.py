"""What the served draft computes, by the module that is trained."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from speculators_core.algorithms._blocks.served import (
    all_at_once,
    filled_block,
    masked_block_knobs,
    stated,
    vocabulary_logits,
)
from speculators_core.algorithms.dflash.config import DFlashConfig
from speculators_core.algorithms.dflash.model import DFlashDraft
from speculators_core.types import Choose, DraftContext, ExportedDraft


def served_config(draft: ExportedDraft) -> DFlashConfig:
    """The knobs that a draft states; FormatError where it is no such draft."""
    return stated(DFlashConfig, draft, masked_block_knobs)


@torch.no_grad()
def draft_logits(model: nn.Module, context: DraftContext, k: int, choose: Choose) -> Tensor:
    """Logits [K, V] of the K masks behind the newest token. See `Proposer`."""
    assert isinstance(model, DFlashDraft)
    hidden_BH = filled_block(model, context, k)
    return all_at_once(vocabulary_logits(model, hidden_BH[model.knobs.first_slot :]), choose)
