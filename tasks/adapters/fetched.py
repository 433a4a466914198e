"""Drafts that were fetched from the registry: where they lie, and who uses them."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path

from speculators_core.store.use import Uses, lock_file, only_holder
from tasks.adapters.settings import Settings

FETCHED = "drafts"
"""Their directory in the state root; each has its digest for a name."""


def use_fetched(settings: Settings, digest: str) -> Path:
    """Where the draft of this digest lies, or is to be put.

    Side effect: until this process ends it counts as in use, and gc leaves it alone.
    """
    _uses(settings.locks).begin(f"{FETCHED}/{digest}")
    target = settings.home / FETCHED / digest
    if target.exists():
        os.utime(target)  # it was used now: what is not used for long may go
    return target


def sole_user(settings: Settings, digest: str, *, create: bool = True) -> AbstractContextManager[bool]:
    """True, and nobody begins to use that draft meanwhile, if nobody uses it now; `create` as for `only_holder`."""
    return only_holder(lock_file(settings.locks, f"{FETCHED}/{digest}", "use"), create=create)


@cache
def _uses(locks: Path) -> Uses:
    return Uses(locks)
