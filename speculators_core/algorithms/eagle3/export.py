"""config.json and tensors of a served EAGLE-3 draft."""

from __future__ import annotations

from torch import nn

from speculators_core.algorithms._blocks.feature_export import layer_config, served_tensors, speculators_section
from speculators_core.algorithms.eagle3.config import Eagle3Config
from speculators_core.algorithms.eagle3.model import Eagle3Draft
from speculators_core.formats.config import FeatureDraftConfig
from speculators_core.formats.servable import check_servable
from speculators_core.types import ExportedDraft


def export(config: Eagle3Config, model: nn.Module, publish: str) -> ExportedDraft:
    """Config and tensors of the served draft.

    Args:
        config: the knobs that the model was built with.
        model: from `build`.
        publish: name of the verifier as the draft shall state it: a hub id, or a local path.

    Raises:
        FormatError: vLLM would not serve it.
    """
    assert isinstance(model, Eagle3Draft)
    import transformers

    draft_config = FeatureDraftConfig(
        architectures=("Eagle3DraftModel",),
        speculators_model_type=config.kind,
        speculators_config=speculators_section(model, config.kind, publish, config.drafted_tokens),
        transformer_layer_config=layer_config(model),
        transformers_version=transformers.__version__,
        draft_vocab_size=model.lm_head.weight.shape[0],
        embed_requires_grad=False,
        eagle_aux_hidden_state_layer_ids=model.aux_layer_ids,
        fc_norm=config.fc_norm,
        norm_before_fc=config.norm_before_fc,
        norm_before_residual=config.norm_before_residual,
        norm_output=config.norm_output,
    )
    draft = ExportedDraft(draft_config.model_dump(mode="json"), served_tensors(model))
    check_servable(draft)
    return draft
