"""A finished set in another directory."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

from speculators_core.errors import CaptureError
from speculators_core.states.sets import INDEX_NAME, StateSet
from speculators_core.states.shards import read_header, verify_shard
from speculators_core.store import storage_errors, write_atomic


def copy_set(states: StateSet, target: Path) -> StateSet:
    """Copy shard by shard, each verified at its new place; the index comes last and makes the directory a set.

    Shards of an earlier copy of this set that are whole are kept: a copy that was cut off goes on.

    Raises:
        CaptureError: a shard is damaged, or the target holds a set already, or shards of another one.
        StoreError: the disk is full or not writable.
    """
    if (target / INDEX_NAME).exists():
        raise CaptureError(f"{target} holds a set already", mend="name a new directory")
    with storage_errors(target, "copying hidden states"):
        target.mkdir(parents=True, exist_ok=True)
    there = [path.name for path in target.glob("*.safetensors") if _is_there(path, states)]
    for entry in states.shards:
        if entry.file not in there:
            shard = target / entry.file
            write_atomic(shard, partial(shutil.copyfile, states.directory / entry.file))
            verify_shard(shard, states.facts)
    copied = StateSet(target, states.index)  # whose shards must fit, before they become a set
    states.index.write(target)
    return copied


def _is_there(shard: Path, states: StateSet) -> bool:
    """Whether a shard is whole, and so need not be copied. CaptureError where it is whole and none of this set's."""
    try:
        header = read_header(shard)
        verify_shard(shard, header.facts)
    except CaptureError:
        return False
    source = states.directory / shard.name
    # equal checksums of every tensor, so equal tensors: rows, lengths and verifier of two sets may agree
    if shard.name not in {entry.file for entry in states.shards} or header != read_header(source):
        raise CaptureError(
            f"{shard.parent} holds a shard of another set: {shard.name}", mend="name a new directory, or empty this one"
        )
    return True
