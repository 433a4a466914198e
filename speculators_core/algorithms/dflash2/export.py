"""From a trained module to what vLLM loads: tensor names, dtypes and config.json."""

from __future__ import annotations

from torch import nn

from speculators_core.algorithms._blocks.block_export import block_config, block_tensors
from speculators_core.algorithms.dflash2.config import DFlash2Config
from speculators_core.algorithms.dflash2.model import DFlash2Draft
from speculators_core.formats.config import SelectingBlockDraftConfig
from speculators_core.formats.servable import check_servable
from speculators_core.types import ExportedDraft


def export(config: DFlash2Config, model: nn.Module, publish: str) -> ExportedDraft:
    """Config and tensors of the served draft. FormatError where vLLM would not serve it as it was trained."""
    assert isinstance(model, DFlash2Draft)
    served = SelectingBlockDraftConfig(
        architectures=("DFlash2DraftModel",),
        conv_kernel_size=config.conv_kernel_size,
        conv_group_size=config.conv_group_size,
        selector_rank=config.selector_rank,
        selector_top_k=config.selector_top_k,
        **block_config(model, config.kind, publish),
    )
    draft = ExportedDraft(served.model_dump(mode="json"), block_tensors(model))
    check_servable(draft)
    return draft
