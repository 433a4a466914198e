"""What the served draft computes, by the module that is trained: the seam of the parity ladder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from speculators_core.algorithms._blocks.feature_replay import served_knobs, vocabulary_logits
from speculators_core.algorithms.peagle.config import PEagleConfig
from speculators_core.algorithms.peagle.elements import every_depth
from speculators_core.algorithms.peagle.model import PEagleDraft
from speculators_core.errors import FormatError
from speculators_core.types import DraftContext


def served_config(served: Mapping[str, Any]) -> PEagleConfig:
    """The knobs that a draft's config.json states; those of training alone keep their defaults.

    Raises:
        FormatError: keys are missing, or of values that no such draft has.
    """
    try:
        knobs = served_knobs(served)
        return PEagleConfig(num_depths=knobs["speculative_tokens"], mask_token_id=served["mask_token_id"], **knobs)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise FormatError(
            f"its config.json is not that of a P-EAGLE draft of ours: {type(error).__name__}: {error}",
            mend="export the draft again",
        ) from error


@torch.no_grad()
def draft_logits(model: nn.Module, context: DraftContext, drafted: Tensor) -> Tensor:
    """Logits [K, V] behind the K tokens of one drafting step: the newest row's, and those of K − 1 masked rows.

    Tokens that the draft cannot propose get −inf, as in vLLM.
    """
    assert isinstance(model, PEagleDraft)
    length = context.input_ids.numel()
    documents_T = torch.zeros(length, dtype=torch.int64)
    hidden_SRH = model(
        context.input_ids,
        torch.arange(length),
        context.aux_TAH.to(model.fc.weight.dtype),
        every_depth(torch.tensor([length - 1]), documents_T, drafted.numel()),
    )
    return vocabulary_logits(model, torch.cat(hidden_SRH))
