"""Parts of a bundle that are loaded when they are first used: a list of algorithms must not load torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from speculators_core.types import Choose, DraftContext, ExportedDraft, Proposer, StrictModel

if TYPE_CHECKING:
    from torch import Tensor, nn


def proposer_in(package: str, *, conventions: tuple[str, ...] = ()) -> Proposer:
    """`served_config` and `draft_logits` of an algorithm's `proposer.py`, see `Proposer`."""

    def module() -> Any:
        return import_module(f"{package}.proposer")

    def config(draft: ExportedDraft) -> StrictModel:
        knobs: StrictModel = module().served_config(draft)
        return knobs

    def logits(model: nn.Module, context: DraftContext, k: int, choose: Choose) -> Tensor:
        found: Tensor = module().draft_logits(model, context, k, choose)
        return found

    return Proposer(config, logits, conventions)
