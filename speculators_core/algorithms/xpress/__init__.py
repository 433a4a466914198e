"""XPress: blocks filled in at once, then refined in parallel rounds that each know the round before."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from speculators_core.algorithms._blocks.lazy import proposer_in
from speculators_core.algorithms.xpress.config import XPressConfig, aux_layers, check
from speculators_core.types import Algorithm, ExportedDraft

if TYPE_CHECKING:
    from torch import nn

    from speculators_core.algorithms.xpress.objective import XPressObjective
    from speculators_core.data.vocabulary import DraftVocabulary


def _build(config: XPressConfig, verifier_dir: Path, draft_vocabulary: DraftVocabulary | None, seed: int) -> nn.Module:
    from speculators_core.algorithms.xpress.build import build

    return build(config, verifier_dir, draft_vocabulary, seed)


def _objective(config: XPressConfig) -> XPressObjective:
    from speculators_core.algorithms.xpress.objective import XPressObjective

    return XPressObjective(config)


def _export(config: XPressConfig, model: nn.Module, publish: str) -> ExportedDraft:
    from speculators_core.algorithms.xpress.export import export

    return export(config, model, publish)


ALGORITHM = Algorithm(
    name="xpress",
    config=XPressConfig,
    build=_build,
    objective=_objective,
    export=_export,
    aux_layers=aux_layers,
    check=check,
    proposer=proposer_in(__name__, conventions=("sliding_window_non_causal",)),
)
