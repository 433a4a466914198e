"""A finished set in another directory."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

from speculators_core.errors import CaptureError
from speculators_core.states.sets import INDEX_NAME, StateSet
from speculators_core.states.shards import verify_shard
from speculators_core.store import storage_errors, write_atomic


def copy_set(states: StateSet, target: Path) -> StateSet:
    """Copy shard by shard, each verified at its new place; the index comes last and makes the directory a set.

    Shards of an earlier copy that are whole are kept: a copy that was cut off goes on.

    Raises:
        CaptureError: a shard is damaged, or the target holds a set already.
        StoreError: the disk is full or not writable.
    """
    if (target / INDEX_NAME).exists():
        raise CaptureError(f"{target} holds a set already", mend="name a new directory")
    with storage_errors(target, "copying hidden states"):
        target.mkdir(parents=True, exist_ok=True)
    for entry in states.shards:
        shard = target / entry.file
        if not _is_whole(shard, states):
            write_atomic(shard, partial(shutil.copyfile, states.directory / entry.file))
            verify_shard(shard, states.facts)
    write_atomic(target / INDEX_NAME, partial(shutil.copyfile, states.directory / INDEX_NAME))
    return StateSet.open(target)


def _is_whole(shard: Path, states: StateSet) -> bool:
    try:
        verify_shard(shard, states.facts)
    except CaptureError:
        return False
    return True
