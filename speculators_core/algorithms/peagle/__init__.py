"""P-EAGLE: all tokens of a draft from one parallel pass over verifier features (arXiv 2602.01469)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from speculators_core.algorithms._blocks.lazy import proposer_in
from speculators_core.algorithms.peagle.config import PEagleConfig, aux_layers
from speculators_core.types import Algorithm, DraftPlan, ExportedDraft

if TYPE_CHECKING:
    from torch import nn

    from speculators_core.algorithms.peagle.objective import PEagleObjective
    from speculators_core.data.vocabulary import DraftVocabulary


def _build(config: PEagleConfig, verifier_dir: Path, draft_vocabulary: DraftVocabulary | None, seed: int) -> nn.Module:
    from speculators_core.algorithms.peagle.build import build

    return build(config, verifier_dir, draft_vocabulary, seed)


def _objective(config: PEagleConfig) -> PEagleObjective:
    from speculators_core.algorithms.peagle.objective import PEagleObjective

    return PEagleObjective(config)


def _export(config: PEagleConfig, model: nn.Module, publish: str) -> ExportedDraft:
    from speculators_core.algorithms.peagle.export import export

    return export(config, model, publish)


def _check(config: PEagleConfig, plan: DraftPlan) -> None:
    from speculators_core.algorithms.peagle.build import check

    check(config, plan)


ALGORITHM = Algorithm(
    name="peagle",
    config=PEagleConfig,
    build=_build,
    objective=_objective,
    export=_export,
    aux_layers=aux_layers,
    check=_check,
    proposer=proposer_in(__name__, conventions=("norm_before_residual", "norm_before_fc", "fc_norm")),
)
