"""EAGLE-3: a small decoder that continues the verifier's own features (arXiv 2503.01840)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speculators_core.algorithms.eagle3.config import Eagle3Config, aux_layers
from speculators_core.types import Algorithm, DraftContext, ExportedDraft, Replay

if TYPE_CHECKING:
    from torch import Tensor, nn

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


def _served_config(served: Mapping[str, Any]) -> Eagle3Config:
    from speculators_core.algorithms.eagle3.replay import served_config

    return served_config(served)


def _draft_logits(model: nn.Module, context: DraftContext, drafted: Tensor) -> Tensor:
    from speculators_core.algorithms.eagle3.replay import draft_logits

    return draft_logits(model, context, drafted)


ALGORITHM = Algorithm(
    name="eagle3",
    config=Eagle3Config,
    build=_build,
    objective=_objective,
    export=_export,
    aux_layers=aux_layers,
    replay=Replay(
        _served_config,
        _draft_logits,
        conventions=("norm_before_residual", "norm_output", "norm_before_fc", "fc_norm"),
    ),
)
