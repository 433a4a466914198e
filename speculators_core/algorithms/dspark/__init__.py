"""DSpark: blocks filled in at once, corrected from left to right by the token before, with a stated confidence."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from speculators_core.algorithms._blocks.lazy import proposer_in
from speculators_core.algorithms.dspark.config import DSparkConfig, aux_layers, check
from speculators_core.types import Algorithm, ExportedDraft

if TYPE_CHECKING:
    from torch import nn

    from speculators_core.algorithms.dspark.objective import DSparkObjective
    from speculators_core.data.vocabulary import DraftVocabulary


def _build(config: DSparkConfig, verifier_dir: Path, draft_vocabulary: DraftVocabulary | None, seed: int) -> nn.Module:
    from speculators_core.algorithms.dspark.build import build

    return build(config, verifier_dir, draft_vocabulary, seed)


def _objective(config: DSparkConfig) -> DSparkObjective:
    from speculators_core.algorithms.dspark.objective import DSparkObjective

    return DSparkObjective(config)


def _export(config: DSparkConfig, model: nn.Module, publish: str) -> ExportedDraft:
    from speculators_core.algorithms.dspark.export import export

    return export(config, model, publish)


ALGORITHM = Algorithm(
    name="dspark",
    config=DSparkConfig,
    build=_build,
    objective=_objective,
    export=_export,
    aux_layers=aux_layers,
    check=check,
    proposer=proposer_in(__name__, conventions=("sliding_window_non_causal",)),
)
