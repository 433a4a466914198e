"""What the served draft computes, by the module that is trained: the seam of the parity ladder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from speculators_core.algorithms._blocks.block_objective import served_blocks
from speculators_core.algorithms._blocks.feature_replay import vocabulary_logits
from speculators_core.algorithms._blocks.geometry import FULL
from speculators_core.algorithms.dflash.config import DFlashConfig
from speculators_core.algorithms.dflash.model import DFlashDraft
from speculators_core.errors import FormatError
from speculators_core.types import DraftContext


def served_config(served: Mapping[str, Any]) -> DFlashConfig:
    """The knobs that a draft's config.json states; those of training alone keep their defaults.

    Raises:
        FormatError: keys are missing, or of values that no such draft has.
    """
    try:
        layers = served["transformer_layer_config"]
        kinds, window = list(layers["layer_types"]), layers["sliding_window"]
        return DFlashConfig(
            layers=len(kinds),
            intermediate_size=layers["intermediate_size"],
            aux_layers=tuple(served["aux_hidden_state_layer_ids"]),
            block_size=served["block_size"],
            sample_from_anchor=served["sample_from_anchor"],
            sliding_window=window,
            full_attention_indices=() if window is None else tuple(i for i, kind in enumerate(kinds) if kind == FULL),
            sliding_window_non_causal=served["sliding_window_non_causal"],
            mask_token_id=served["mask_token_id"],
        )
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise FormatError(
            f"its config.json is not that of a DFlash draft of ours: {type(error).__name__}: {error}",
            mend="export the draft again",
        ) from error


@torch.no_grad()
def draft_logits(model: nn.Module, context: DraftContext, drafted: Tensor) -> Tensor:
    """Logits [K, V] of the K masks behind the newest token, which stands behind the last feature.

    Tokens that the draft cannot propose get −inf, as in vLLM.
    """
    assert isinstance(model, DFlashDraft)
    anchor = context.input_ids.numel()
    knobs = model.knobs
    blocks = served_blocks(knobs, torch.zeros(anchor + 1, dtype=torch.int64), torch.tensor([anchor]), drafted.numel())
    hidden_MBH = model(
        torch.cat([context.input_ids[:1], context.input_ids]),  # only the anchor's token is read
        torch.arange(anchor + 1),
        functional.pad(context.aux_TAH.to(model.fc.weight.dtype), (0, 0, 0, 1)),  # a block reads features before it
        blocks,
    )
    return vocabulary_logits(model, hidden_MBH[0, knobs.first_slot :])
