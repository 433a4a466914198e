"""P-EAGLE: all tokens of a draft from one parallel pass over verifier features (arXiv 2602.01469)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speculators_core.algorithms.peagle.config import PEagleConfig, aux_layers
from speculators_core.types import Algorithm, DraftContext, DraftPlan, ExportedDraft, Replay

if TYPE_CHECKING:
    from torch import Tensor, nn

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


def _served_config(served: Mapping[str, Any]) -> PEagleConfig:
    from speculators_core.algorithms.peagle.replay import served_config

    return served_config(served)


def _draft_logits(model: nn.Module, context: DraftContext, drafted: Tensor) -> Tensor:
    from speculators_core.algorithms.peagle.replay import draft_logits

    return draft_logits(model, context, drafted)


ALGORITHM = Algorithm(
    name="peagle",
    config=PEagleConfig,
    build=_build,
    objective=_objective,
    export=_export,
    aux_layers=aux_layers,
    check=_check,
    replay=Replay(_served_config, _draft_logits, conventions=("norm_before_residual", "norm_before_fc", "fc_norm")),
)
