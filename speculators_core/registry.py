"""Algorithms by name. Reading names and configurations imports no torch."""

from __future__ import annotations

import difflib
from importlib import import_module

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
    """The algorithm of that name; ConfigError with the nearest right one."""
    module = _MODULES.get(name)
    if module is None:
        begun = [known for known in names() if known.startswith(name)]
        nearest = begun or difflib.get_close_matches(name, _MODULES, n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"choose among {', '.join(names())}"
        raise ConfigError(f"unknown algorithm {name!r}", mend=hint)
    algorithm = import_module(module).ALGORITHM
    assert isinstance(algorithm, Algorithm)
    return algorithm


__all__ = ["names", "resolve"]
