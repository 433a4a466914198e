"""From a trained feature draft to what vLLM loads: layer config, tensor names and dtypes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from speculators_core.algorithms._blocks.feature_draft import FeatureDraft
from speculators_core.formats.config import GreedyProposal, SpeculatorsSection, VerifierReference
from speculators_core.formats.servable import DEFAULT_FEATURES


def layer_config(model: FeatureDraft) -> dict[str, Any]:
    """`transformer_layer_config`, with what vLLM's llama class reads there and nowhere else."""
    config = model.geometry.to_transformers()
    # it counts features from the layer config, and reads the draft's logit scale there
    if model.num_aux != DEFAULT_FEATURES:
        config["num_aux_hidden_states"] = model.num_aux
    if model.draft_logit_scale != 1.0:
        config["logit_scale"] = model.draft_logit_scale
    return config


def speculators_section(model: FeatureDraft, algorithm: str, publish: str, drafted_tokens: int) -> SpeculatorsSection:
    """What vLLM needs to set speculation up. `publish` is the verifier's hub id, or a local path."""
    return SpeculatorsSection(
        algorithm=algorithm,
        proposal_methods=(GreedyProposal(speculative_tokens=drafted_tokens),),
        verifier=VerifierReference(name_or_path=publish, architectures=model.verifier_architectures),
    )


def served_tensors(model: FeatureDraft) -> dict[str, Tensor]:
    """All that is served: floats in bfloat16, d2t and t2d only for a reduced vocabulary, nothing of the teacher."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name.startswith("teacher."):  # the verifier's side of training
            continue
        value = tensor.detach()
        tensors[name] = value.to(torch.bfloat16) if value.is_floating_point() else value
    return tensors
