"""config.json and tensors of a served P-EAGLE draft."""

from __future__ import annotations

from torch import nn

from speculators_core.algorithms._blocks.feature_export import layer_config, served_tensors, speculators_section
from speculators_core.algorithms.peagle.config import PEagleConfig
from speculators_core.algorithms.peagle.model import PEagleDraft
from speculators_core.formats.config import ParallelFeatureDraftConfig
from speculators_core.formats.servable import check_servable
from speculators_core.types import ExportedDraft


def export(config: PEagleConfig, model: nn.Module, publish: str) -> ExportedDraft:
    """Config and tensors of the served draft; the trained embedding goes with it.

    Args:
        config: the knobs that the model was built with.
        model: from `build`.
        publish: name of the verifier as the draft shall state it: a hub id, or a local path.

    Raises:
        FormatError: vLLM would not serve it.
    """
    assert isinstance(model, PEagleDraft)
    import transformers

    layers = layer_config(model)
    if config.fc_norm:  # vLLM does not hand this method's top-level flag to its module
        layers["fc_norm"] = True
    draft_config = ParallelFeatureDraftConfig(
        architectures=("PEagleDraftModel",),
        speculators_model_type=config.kind,
        speculators_config=speculators_section(model, config.kind, publish, config.drafted_tokens),
        transformer_layer_config=layers,
        transformers_version=transformers.__version__,
        draft_vocab_size=model.lm_head.weight.shape[0],
        embed_requires_grad=True,
        eagle_aux_hidden_state_layer_ids=model.aux_layer_ids,
        fc_norm=config.fc_norm,
        mask_token_id=model.mask_token_id,
        norm_before_fc=config.norm_before_fc,
        norm_before_residual=config.norm_before_residual,
        norm_output=False,
    )
    draft = ExportedDraft(draft_config.model_dump(mode="json"), served_tensors(model))
    check_servable(draft)
    return draft
