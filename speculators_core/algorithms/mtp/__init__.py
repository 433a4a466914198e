"""MTP: a verifier's own multi-token head, tuned to be run several times in a row (FastMTP, arXiv 2509.18362)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from speculators_core.algorithms._blocks.lazy import proposer_in
from speculators_core.algorithms.mtp.config import MTPConfig, aux_layers
from speculators_core.types import Algorithm, DraftPlan, ExportedDraft

if TYPE_CHECKING:
    from torch import Tensor, nn

    from speculators_core.algorithms.mtp.objective import MTPObjective
    from speculators_core.data.vocabulary import DraftVocabulary


def _build(config: MTPConfig, verifier_dir: Path, draft_vocabulary: DraftVocabulary | None, seed: int) -> nn.Module:
    from speculators_core.algorithms.mtp.build import build

    return build(config, verifier_dir, draft_vocabulary, seed)


def _objective(config: MTPConfig) -> MTPObjective:
    from speculators_core.algorithms.mtp.objective import MTPObjective

    return MTPObjective(config)


def _export(config: MTPConfig, model: nn.Module, publish: str) -> ExportedDraft:
    from speculators_core.algorithms.mtp.export import export

    return export(config, model, publish)


def _check(config: MTPConfig, plan: DraftPlan) -> None:
    from speculators_core.algorithms.mtp.build import check

    check(config, plan)


def _stitch(draft_dir: Path, verifier_dir: Path, target: Path, *, link: bool) -> int:
    from speculators_core.algorithms.mtp.export import stitch

    return stitch(draft_dir, verifier_dir, target, link=link)


def _names(config: MTPConfig, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    from speculators_core.algorithms.mtp.native import from_checkpoint

    return {from_checkpoint(name): tensor for name, tensor in tensors.items()}


ALGORITHM = Algorithm(
    name="mtp",
    config=MTPConfig,
    build=_build,
    objective=_objective,
    export=_export,
    aux_layers=aux_layers,
    check=_check,
    stitch=_stitch,
    names=_names,
    proposer=proposer_in(__name__),
)
