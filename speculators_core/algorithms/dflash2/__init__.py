"""DFlash2: blocks with short convolutions along them, and a selector that knows the token before."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from speculators_core.algorithms._blocks.lazy import proposer_in
from speculators_core.algorithms.dflash2.config import DFlash2Config, aux_layers, check
from speculators_core.types import Algorithm, ExportedDraft

if TYPE_CHECKING:
    from torch import nn

    from speculators_core.algorithms.dflash2.objective import DFlash2Objective
    from speculators_core.data.vocabulary import DraftVocabulary


def _build(config: DFlash2Config, verifier_dir: Path, draft_vocabulary: DraftVocabulary | None, seed: int) -> nn.Module:
    from speculators_core.algorithms.dflash2.build import build

    return build(config, verifier_dir, draft_vocabulary, seed)


def _objective(config: DFlash2Config) -> DFlash2Objective:
    from speculators_core.algorithms.dflash2.objective import DFlash2Objective

    return DFlash2Objective(config)


def _export(config: DFlash2Config, model: nn.Module, publish: str) -> ExportedDraft:
    from speculators_core.algorithms.dflash2.export import export

    return export(config, model, publish)


ALGORITHM = Algorithm(
    name="dflash2",
    config=DFlash2Config,
    build=_build,
    objective=_objective,
    export=_export,
    aux_layers=aux_layers,
    check=check,
    proposer=proposer_in(__name__, conventions=("sliding_window_non_causal",)),
)
