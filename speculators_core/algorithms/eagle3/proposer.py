"""What the served draft computes, by the module that is trained: the seam of the parity ladder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from speculators_core.algorithms._blocks.feature_replay import served_knobs, vocabulary_logits
from speculators_core.algorithms._blocks.unrolled import Drafting
from speculators_core.algorithms.eagle3.config import Eagle3Config
from speculators_core.algorithms.eagle3.model import Eagle3Draft
from speculators_core.errors import FormatError
from speculators_core.types import DraftContext


def served_config(served: Mapping[str, Any]) -> Eagle3Config:
    """The knobs that a draft's config.json states; those of training alone keep their defaults.

    Raises:
        FormatError: keys are missing, or of values that no such draft has.
    """
    try:
        return Eagle3Config(norm_output=served["norm_output"], **served_knobs(served))
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise FormatError(
            f"its config.json is not that of an EAGLE-3 draft of ours: {type(error).__name__}: {error}",
            mend="export the draft again",
        ) from error


@torch.no_grad()
def draft_logits(model: nn.Module, context: DraftContext, drafted: Tensor) -> Tensor:
    """Logits [K, V] behind the K tokens of one drafting step, each fed the drafted tokens before it.

    Tokens that the draft cannot propose get −inf, as in vLLM.
    """
    assert isinstance(model, Eagle3Draft)
    steps, length = drafted.numel(), context.input_ids.numel()
    ahead = steps - 1
    whole = length + ahead
    rows = torch.tensor([length - 1])
    hidden_SRH = model(
        torch.cat([context.input_ids, drafted[:ahead]]),
        torch.arange(whole),
        functional.pad(context.aux_TAH.to(model.fc.weight.dtype), (0, 0, 0, ahead)),
        Drafting(rows, torch.zeros(whole, dtype=torch.int64)),
        steps,
    )
    return vocabulary_logits(model, torch.cat(hidden_SRH))
