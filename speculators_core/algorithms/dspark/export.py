"""From a trained module to what vLLM loads: tensor names, dtypes and config.json."""

from __future__ import annotations

from torch import nn

from speculators_core.algorithms._blocks.block_export import block_config, block_tensors
from speculators_core.algorithms._blocks.geometry import SLIDING
from speculators_core.algorithms.dspark.config import DSparkConfig
from speculators_core.algorithms.dspark.model import DSparkDraft
from speculators_core.formats.config import CorrectedBlockDraftConfig
from speculators_core.formats.servable import check_servable
from speculators_core.types import ExportedDraft


def export(config: DSparkConfig, model: nn.Module, publish: str) -> ExportedDraft:
    """Config and tensors of the served draft. FormatError where they would not be served as they were trained.

    Heads that vLLM does not know are written as the format has them; `unservable` tells which those are.
    """
    assert isinstance(model, DSparkDraft)
    common = block_config(model, config.kind, publish)
    if config.sliding_window_non_causal and SLIDING in model.geometry.layer_types:
        common["transformer_layer_config"]["is_causal"] = False  # vLLM reads no other key for this method
    served = CorrectedBlockDraftConfig(
        architectures=("DSparkDraftModel",),
        markov_rank=config.markov_rank,
        markov_head_type=config.markov_head_type,
        enable_confidence_head=config.enable_confidence_head,
        confidence_head_with_markov=model.reads_markov,
        **common,
    )
    draft = ExportedDraft(served.model_dump(mode="json"), block_tensors(model))
    check_servable(draft)
    return draft
