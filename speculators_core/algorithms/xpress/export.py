"""From a trained module to the format's files: tensor names, dtypes and config.json. vLLM 0.32 does not load them."""

from __future__ import annotations

from torch import nn

from speculators_core.algorithms._blocks.block_export import block_config, block_tensors
from speculators_core.algorithms.xpress.config import XPressConfig
from speculators_core.algorithms.xpress.model import XPressDraft
from speculators_core.formats.config import RefinedBlockDraftConfig
from speculators_core.formats.servable import check_servable
from speculators_core.types import ExportedDraft


def export(config: XPressConfig, model: nn.Module, publish: str) -> ExportedDraft:
    """Config and tensors in the speculators format. FormatError where they do not belong together."""
    assert isinstance(model, XPressDraft)
    served = RefinedBlockDraftConfig(
        architectures=("XPressDraftModel",),
        xpress_rank=config.xpress_rank,
        xpress_mlp_ratio=config.xpress_mlp_ratio,
        num_jacobi_passes=config.num_jacobi_passes,
        **block_config(model, config.kind, publish),
    )
    draft = ExportedDraft(served.model_dump(mode="json"), block_tensors(model))
    check_servable(draft)
    return draft
