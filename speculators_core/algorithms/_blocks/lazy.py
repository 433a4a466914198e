"""Parts of a bundle that are loaded when they are first used: a list of algorithms must not load torch."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from speculators_core.types import Proposer


def later(module: str, name: str) -> Callable[..., Any]:
    """A function or class of a module that is imported at its first call."""

    def call(*args: Any, **options: Any) -> Any:
        return getattr(import_module(module), name)(*args, **options)

    return call


def proposer_in(package: str, *, conventions: tuple[str, ...] = ()) -> Proposer:
    """`served_config` and `draft_logits` of an algorithm's `proposer.py`, see `Proposer`."""
    module = f"{package}.proposer"
    return Proposer(later(module, "served_config"), later(module, "draft_logits"), conventions)
