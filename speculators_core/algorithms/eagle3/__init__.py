"""EAGLE-3: a small decoder that continues the verifier's own features (arXiv 2503.01840)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from speculators_core.algorithms._blocks.lazy import proposer_in
from speculators_core.algorithms.eagle3.config import Eagle3Config, aux_layers
from speculators_core.types import Algorithm, ExportedDraft

if TYPE_CHECKING:
    from torch import nn

    from speculators_core.algorithms.eagle3.objective import Eagle3Objective
    from speculators_core.data.vocabulary import DraftVocabulary


def _build(config: Eagle3Config, verifier_dir: Path, draft_vocabulary: DraftVocabulary | None, seed: int) -> nn.Module:
    from speculators_core.algorithms.eagle3.build import build

    return build(config, verifier_dir, draft_vocabulary, seed)


def _objective(config: Eagle3Config) -> Eagle3Objective:
    from speculators_core.algorithms.eagle3.objective import Eagle3Objective

    return Eagle3Objective(config)


def _export(config: Eagle3Config, model: nn.Module, publish: str) -> ExportedDraft:
    from speculators_core.algorithms.eagle3.export import export

    return export(config, model, publish)


ALGORITHM = Algorithm(
    name="eagle3",
    config=Eagle3Config,
    build=_build,
    objective=_objective,
    export=_export,
    aux_layers=aux_layers,
    proposer=proposer_in(__name__, conventions=("norm_before_residual", "norm_output", "norm_before_fc", "fc_norm")),
)
