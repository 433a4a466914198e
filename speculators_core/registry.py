"""Algorithms by name. Reading names and configurations imports no torch."""

from __future__ import annotations

import difflib
from importlib import import_module
from itertools import takewhile

from speculators_core.errors import ConfigError
from speculators_core.types import Algorithm

_MODULES = {
    "dflash": "speculators_core.algorithms.dflash",
    "dflash2": "speculators_core.algorithms.dflash2",
    "dspark": "speculators_core.algorithms.dspark",
    "eagle3": "speculators_core.algorithms.eagle3",
    "mtp": "speculators_core.algorithms.mtp",
    "peagle": "speculators_core.algorithms.peagle",
    "xpress": "speculators_core.algorithms.xpress",
}


def names() -> tuple[str, ...]:
    """Names that `resolve` knows, sorted."""
    return tuple(sorted(_MODULES))


def resolve(name: str) -> Algorithm:
    """The algorithm of that name; ConfigError with the nearest right one, and all of them."""
    module = _MODULES.get(name)
    if module is None:
        nearest = max(names(), key=lambda known: _likeness(name, known))
        hint = f"did you mean {nearest!r}? " if max(_likeness(name, nearest)) >= _ALIKE else ""
        raise ConfigError(f"unknown algorithm {name!r}", mend=f"{hint}kinds: {', '.join(names())}")
    algorithm = import_module(module).ALGORITHM
    assert isinstance(algorithm, Algorithm)
    return algorithm


_ALIKE = 0.6


def _likeness(name: str, known: str) -> tuple[float, float]:
    """How much of a name another begins with, then how alike they are: numbers and endings are what one gets wrong."""
    folded = name.casefold()
    begun = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(folded, known, strict=False)))
    return begun / max(len(name), 1), difflib.SequenceMatcher(None, folded, known).ratio()


__all__ = ["names", "resolve"]
