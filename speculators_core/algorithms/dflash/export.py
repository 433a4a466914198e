"""From a trained module to what vLLM loads: tensor names, dtypes and config.json."""

from __future__ import annotations

from torch import nn

from speculators_core.algorithms._blocks.block_export import block_config, block_tensors
from speculators_core.algorithms.dflash.config import DFlashConfig
from speculators_core.algorithms.dflash.model import DFlashDraft
from speculators_core.formats.config import BlockDraftConfig
from speculators_core.formats.servable import check_servable
from speculators_core.types import ExportedDraft


def export(config: DFlashConfig, model: nn.Module, publish: str) -> ExportedDraft:
    """Config and tensors of the served draft. FormatError where vLLM would not serve it as it was trained."""
    assert isinstance(model, DFlashDraft)
    served = BlockDraftConfig(architectures=("DFlashDraftModel",), **block_config(model, config.kind, publish))
    draft = ExportedDraft(served.model_dump(mode="json"), block_tensors(model))
    check_servable(draft)
    return draft
