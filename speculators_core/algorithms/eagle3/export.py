"""From a trained module to what vLLM loads: tensor names, dtypes and config.json."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from speculators_core.algorithms.eagle3.config import Eagle3Config
from speculators_core.algorithms.eagle3.model import Eagle3Draft
from speculators_core.formats.config import (
    FeatureDraftConfig,
    GreedyProposal,
    SpeculatorsSection,
    VerifierReference,
)
from speculators_core.formats.servable import DEFAULT_FEATURES, check_servable
from speculators_core.types import ExportedDraft


def export(config: Eagle3Config, model: nn.Module, publish: str) -> ExportedDraft:
    """Config and tensors of the served draft; floats in bfloat16, d2t and t2d only for a reduced vocabulary.

    Args:
        config: the knobs that the model was built with.
        model: from `build`.
        publish: name of the verifier as the draft shall state it: a hub id, or a local path.

    Raises:
        FormatError: vLLM would not serve it.
    """
    assert isinstance(model, Eagle3Draft)
    import transformers

    layer_config = model.geometry.to_transformers()
    # vLLM's llama class counts features from the layer config, and reads the draft's logit scale there.
    if model.num_aux != DEFAULT_FEATURES:
        layer_config["num_aux_hidden_states"] = model.num_aux
    if model.draft_logit_scale != 1.0:
        layer_config["logit_scale"] = model.draft_logit_scale
    draft_config = FeatureDraftConfig(
        architectures=("Eagle3DraftModel",),
        speculators_model_type=config.kind,
        speculators_config=SpeculatorsSection(
            algorithm=config.kind,
            proposal_methods=(GreedyProposal(speculative_tokens=config.drafted_tokens),),
            verifier=VerifierReference(name_or_path=publish, architectures=model.verifier_architectures),
        ),
        transformer_layer_config=layer_config,
        transformers_version=transformers.__version__,
        draft_vocab_size=model.lm_head.weight.shape[0],
        embed_requires_grad=False,
        eagle_aux_hidden_state_layer_ids=model.aux_layer_ids,
        fc_norm=config.fc_norm,
        norm_before_fc=config.norm_before_fc,
        norm_before_residual=config.norm_before_residual,
        norm_output=config.norm_output,
    )
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name.startswith("teacher."):  # the verifier's side of training
            continue
        value = tensor.detach()
        tensors[name] = value.to(torch.bfloat16) if value.is_floating_point() else value
    draft = ExportedDraft(draft_config.model_dump(mode="json"), tensors)
    check_servable(draft)
    return draft
