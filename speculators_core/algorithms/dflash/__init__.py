"""DFlash: a block of masks behind the newest token, filled in by one pass over the verifier's features."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speculators_core.algorithms.dflash.config import DFlashConfig, aux_layers, check
from speculators_core.types import Algorithm, DraftContext, ExportedDraft, Replay

if TYPE_CHECKING:
    from torch import Tensor, nn

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


def _served_config(served: Mapping[str, Any]) -> DFlashConfig:
    from speculators_core.algorithms.dflash.replay import served_config

    return served_config(served)


def _draft_logits(model: nn.Module, context: DraftContext, drafted: Tensor) -> Tensor:
    from speculators_core.algorithms.dflash.replay import draft_logits

    return draft_logits(model, context, drafted)


ALGORITHM = Algorithm(
    name="dflash",
    config=DFlashConfig,
    build=_build,
    objective=_objective,
    export=_export,
    aux_layers=aux_layers,
    check=check,
    replay=Replay(_served_config, _draft_logits, conventions=("sliding_window_non_causal",)),
)
