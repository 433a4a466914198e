"""DFlash: a block of masks behind the newest token, filled in by one pass over the verifier's features."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from speculators_core.algorithms._blocks.lazy import proposer_in
from speculators_core.algorithms.dflash.config import DFlashConfig, aux_layers, check
from speculators_core.types import Algorithm, ExportedDraft

if TYPE_CHECKING:
    from torch import nn

    from speculators_core.algorithms.dflash.objective import DFlashObjective
    from speculators_core.data.vocabulary import DraftVocabulary


def _build(config: DFlashConfig, verifier_dir: Path, draft_vocabulary: DraftVocabulary | None, seed: int) -> nn.Module:
    from speculators_core.algorithms.dflash.build import build

    return build(config, verifier_dir, draft_vocabulary, seed)


def _objective(config: DFlashConfig) -> DFlashObjective:
    from speculators_core.algorithms.dflash.objective import DFlashObjective

    return DFlashObjective(config)


def _export(config: DFlashConfig, model: nn.Module, publish: str) -> ExportedDraft:
    from speculators_core.algorithms.dflash.export import export

    return export(config, model, publish)


ALGORITHM = Algorithm(
    name="dflash",
    config=DFlashConfig,
    build=_build,
    objective=_objective,
    export=_export,
    aux_layers=aux_layers,
    check=check,
    proposer=proposer_in(__name__, conventions=("sliding_window_non_causal",)),
)
