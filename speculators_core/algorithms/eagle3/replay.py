"""What the served draft computes, by the module that is trained: the seam of the parity ladder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from speculators_core.algorithms._blocks.geometry import FULL
from speculators_core.algorithms.eagle3.config import Eagle3Config
from speculators_core.algorithms.eagle3.model import Drafting, Eagle3Draft
from speculators_core.errors import FormatError
from speculators_core.types import DraftContext


def served_config(served: Mapping[str, Any]) -> Eagle3Config:
    """The knobs that a draft's config.json states; those of training alone keep their defaults.

    Raises:
        FormatError: keys are missing, or of values that no such draft has.
    """
    try:
        layers = served["transformer_layer_config"]
        kinds = list(layers["layer_types"])
        window = layers["sliding_window"]
        return Eagle3Config(
            style=layers["model_type"],
            layers=len(kinds),
            intermediate_size=layers["intermediate_size"],
            aux_layers=tuple(served["eagle_aux_hidden_state_layer_ids"]),
            norm_before_residual=served["norm_before_residual"],
            norm_before_fc=served["norm_before_fc"],
            fc_norm=served["fc_norm"],
            norm_output=served["norm_output"],
            sliding_window=window,
            full_attention_layers=() if window is None else tuple(i for i, kind in enumerate(kinds) if kind == FULL),
            speculative_tokens=served["speculators_config"]["proposal_methods"][0]["speculative_tokens"],
        )
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
    hidden_KH = torch.cat(hidden_SRH)
    logits_KD = (hidden_KH @ model.lm_head.weight.to(hidden_KH.dtype).T) * model.draft_logit_scale
    if model.vocabulary is None:
        return logits_KD
    logits_KV = logits_KD.new_full((steps, model.embed_tokens.num_embeddings), float("-inf"))
    logits_KV[:, model.vocabulary.verifier_ids_D] = logits_KD
    return logits_KV
