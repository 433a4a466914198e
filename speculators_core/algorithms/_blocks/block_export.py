"""From a trained draft of anchored blocks to what vLLM loads: keys that all of them have, tensor names and dtypes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from speculators_core.algorithms._blocks.block_draft import BlockDraft
from speculators_core.formats.config import GreedyProposal, SpeculatorsSection, VerifierReference


def block_config(model: BlockDraft, algorithm: str, publish: str) -> dict[str, Any]:
    """Arguments of a `BlockDraftConfig` but for its `architectures`.

    Args:
        publish: name of the verifier as the draft shall state it: a hub id, or a local path.
    """
    import transformers

    knobs = model.knobs
    layer_config = model.geometry.to_transformers()
    if model.draft_logit_scale != 1.0:  # vLLM reads the scale of the draft's logits there
        layer_config["logit_scale"] = model.draft_logit_scale
    return {
        "speculators_model_type": algorithm,
        "speculators_config": SpeculatorsSection(
            algorithm=algorithm,
            proposal_methods=(GreedyProposal(speculative_tokens=knobs.drafted_tokens),),
            verifier=VerifierReference(name_or_path=publish, architectures=model.verifier_architectures),
        ),
        "transformer_layer_config": layer_config,
        "transformers_version": transformers.__version__,
        "draft_vocab_size": model.lm_head.weight.shape[0],
        "aux_hidden_state_layer_ids": model.aux_layer_ids,
        "block_size": knobs.block_size,
        "mask_token_id": model.mask_token_id,
        "sample_from_anchor": knobs.sample_from_anchor,
        "sliding_window_non_causal": knobs.sliding_window_non_causal,
    }


def block_tensors(model: BlockDraft) -> dict[str, Tensor]:
    """All that is served: floats in bfloat16; embedding and whole head are the verifier's own, which vLLM shares."""
    left_out = ("teacher.", "embed_tokens.", *(() if model.vocabulary is not None else ("lm_head.",)))
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if not name.startswith(left_out):
            value = tensor.detach()
            tensors[name] = value.to(torch.bfloat16) if value.is_floating_point() else value
    return tensors
