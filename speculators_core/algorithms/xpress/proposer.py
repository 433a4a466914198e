"""What a served draft would compute, by the module that is trained."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from speculators_core.algorithms._blocks.served import (
    all_at_once,
    block_knobs,
    filled_block,
    row_before,
    stated,
    vocabulary_logits,
)
from speculators_core.algorithms.xpress.config import XPressConfig
from speculators_core.algorithms.xpress.model import XPressDraft
from speculators_core.types import Choose, DraftContext, ExportedDraft

_KNOBS = ("xpress_rank", "xpress_mlp_ratio", "num_jacobi_passes")


def served_config(draft: ExportedDraft) -> XPressConfig:
    """The knobs that a draft states; FormatError where it is no such draft."""
    return stated(XPressConfig, draft, lambda draft: block_knobs(draft) | {name: draft.config[name] for name in _KNOBS})


@torch.no_grad()
def draft_logits(model: nn.Module, context: DraftContext, k: int, choose: Choose) -> Tensor:
    """Logits [K, V] of one drafting step: of the whole block's last round of refinement. See `Proposer`."""
    assert isinstance(model, XPressDraft)
    config = model.config
    hidden_1BH = filled_block(model, context, k, slots=config.block_size)[None]
    row_T = row_before(context)
    anchor = torch.tensor([row_T.numel() - 1])
    known_1B = model.known_tokens(row_T, torch.zeros_like(row_T), anchor)
    before_last_1B = model.rounds(hidden_1BH, known_1B, config.num_jacobi_passes, config.loss_chunk)[-2]
    u_1Br = model.refiner_head(model.refiner_head.states(hidden_1BH), before_last_1B)
    bias_BD = (u_1Br @ model.refiner_head.readout.weight.T)[0]
    drafting = slice(config.first_slot, config.first_slot + k)
    return all_at_once(vocabulary_logits(model, hidden_1BH[0, drafting], bias_BD[drafting]), choose)
