"""What replays of served feature drafts have in common: the knobs that config.json states, and logits as vLLM has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from speculators_core.algorithms._blocks.block_draft import BlockDraft
from speculators_core.algorithms._blocks.feature_draft import FeatureDraft
from speculators_core.algorithms._blocks.geometry import FULL


def served_knobs(served: Mapping[str, Any]) -> dict[str, Any]:
    """Knobs of a `FeatureDraft` and how many tokens it drafts; KeyError, IndexError or TypeError where keys lack."""
    layers = served["transformer_layer_config"]
    kinds, window = list(layers["layer_types"]), layers["sliding_window"]
    return {
        "style": layers["model_type"],
        "layers": len(kinds),
        "intermediate_size": layers["intermediate_size"],
        "aux_layers": tuple(served["eagle_aux_hidden_state_layer_ids"]),
        "norm_before_residual": served["norm_before_residual"],
        "norm_before_fc": served["norm_before_fc"],
        "fc_norm": served["fc_norm"],
        "sliding_window": window,
        "full_attention_layers": () if window is None else tuple(i for i, kind in enumerate(kinds) if kind == FULL),
        "speculative_tokens": served["speculators_config"]["proposal_methods"][0]["speculative_tokens"],
    }


def vocabulary_logits(model: FeatureDraft | BlockDraft, hidden_KH: Tensor) -> Tensor:
    """[K, V] of normalised states; tokens that the draft cannot propose get −inf, as in vLLM."""
    logits_KD = (hidden_KH @ model.lm_head.weight.to(hidden_KH.dtype).T) * model.draft_logit_scale
    if model.vocabulary is None:
        return logits_KD
    logits_KV = logits_KD.new_full((hidden_KH.shape[0], model.embed_tokens.num_embeddings), float("-inf"))
    logits_KV[:, model.vocabulary.verifier_ids_D] = logits_KD
    return logits_KV
