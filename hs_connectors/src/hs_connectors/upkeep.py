"""Care of a store of records, whatever its backend: check, clear away, copy."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hs_connectors.backends._ownership import OWN_PLACE, kind_of
from hs_connectors.contract import Backend, Entry, Payload, Record
from hs_connectors.errors import CaptureFailed, ConnectorError, EntryError, RecordError, RecordTimeout, SettingsError
from hs_connectors.record import unpack

_IDENTITY = ("verifier_fingerprint", "layer_ids", "norm_point", "states_dtype", "codec")
"""Of an engine's announcement: what the records of one store have in common."""


@dataclass(frozen=True)
class Checked:
    """An entry with its verified record, or with what is wrong about it."""

    entry: Entry
    record: Record | None
    problem: str | None


@dataclass(frozen=True)
class Expired:
    """An entry that nobody will take any more; with a problem it stays: it is not ours, or cannot be deleted."""

    entry: Entry
    problem: str | None


@dataclass(frozen=True)
class Copied:
    """What a copy did: records and bytes that were written, records that were there already."""

    records: int
    num_bytes: int
    there: int


def check(backend: Backend) -> Iterator[Checked]:
    """Read every entry whole and verify it; entries that are deleted meanwhile are left out.

    Raises StorageError where the store itself cannot be read.
    """
    for entry in backend.entries():
        try:
            yield Checked(entry, unpack(backend.fetch(entry.key, 0)), None)
        except (RecordError, CaptureFailed, EntryError) as error:
            yield Checked(entry, None, error.what)
        except RecordTimeout:
            continue


def collect(backend: Backend, older_than_s: float, *, apply: bool) -> list[Expired]:
    """Entries that were written longer ago than a reader may take; with `apply` they are deleted.

    Weights of other people that bear the names of records are none, and stay: expired records are read to know that.
    With `apply`, too, what killed writers left half written goes, as at the start of every engine. StorageError.
    """
    oldest = time.time() - older_than_s
    expired = []
    for entry in [entry for entry in backend.entries() if entry.modified_at < oldest]:
        problem = None
        try:
            if _is_foreign(_payload(backend, entry.key)):
                continue
            if apply:
                backend.discard(entry.key)
        except EntryError as error:
            problem = error.what
        expired.append(Expired(entry, problem))
    if apply:
        backend.prepare()
    return expired


def copy(source: Backend, target: Backend) -> Iterator[Copied]:
    """Copy all records, verified, and the announcement; yields the sums so far after each. Error markers stay.

    Records whose very bytes lie in the target are not written again: a copy that was cut off goes on. Weights of other
    people stay where they are, on both sides.

    Raises SettingsError where the target is announced as another engine's, ConnectorError at the first record that is
    damaged, or where a store refuses.
    """
    facts, announced = source.announcement(), target.announcement()
    if facts is not None and announced is not None:
        _require_alike(facts, announced)
    target.prepare()
    if facts is not None and announced is None:
        target.announce(facts)
    there = {entry.key for entry in target.entries()}
    records = num_bytes = skipped = 0
    for entry in source.entries():
        if entry.kind == "error":
            continue
        try:
            payload = source.fetch(entry.key, 0)
        except RecordTimeout:
            continue  # deleted meanwhile
        try:
            unpack(payload)
        except RecordError as error:
            if _is_foreign(payload):
                continue
            raise ConnectorError(f"record {entry.key}: {error.what}", mend="delete it, and copy again") from error
        lying = _payload(target, entry.key) if entry.key in there else None
        if lying is not None and bytearray(lying) == payload:  # a bytearray compares whole, a view byte by byte
            skipped += 1
        elif _is_foreign(lying):
            raise SettingsError(f"{entry.key} of the target holds tensors, but no record", mend=OWN_PLACE)
        else:
            target.publish(entry.key, payload)
            records, num_bytes = records + 1, num_bytes + len(payload)
        yield Copied(records, num_bytes, skipped)


def _require_alike(facts: Mapping[str, Any], announced: Mapping[str, Any]) -> None:
    different = [name for name in _IDENTITY if facts.get(name) != announced.get(name)]
    if different:
        sides = [f"\n    {name}: {facts.get(name)} here, {announced.get(name)} in the target" for name in different]
        raise SettingsError(
            f"the target holds the states of another engine: {', '.join(different)} differ{''.join(sides)}",
            mend="copy to a new place: who reads a store believes that all its records are those of one engine",
        )


def _payload(backend: Backend, key: str) -> Payload | None:
    """What lies there; None where it is gone, damaged or an error marker."""
    try:
        return backend.fetch(key, 0)
    except (RecordTimeout, RecordError, CaptureFailed):
        return None


def _is_foreign(payload: Payload | None) -> bool:
    return payload is not None and kind_of(lambda num_bytes: bytes(payload[:num_bytes])) == "foreign"
