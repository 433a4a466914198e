"""Care of a store of records, whatever its backend: check, clear away, copy."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from hs_connectors.backends._ownership import kind_of
from hs_connectors.contract import Backend, Entry, Payload, Record
from hs_connectors.errors import CaptureFailed, ConnectorError, RecordError, RecordTimeout
from hs_connectors.record import unpack


@dataclass(frozen=True)
class Checked:
    """An entry with its verified record, or with what is wrong about it."""

    entry: Entry
    record: Record | None
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
        except (RecordError, CaptureFailed) as error:
            yield Checked(entry, None, error.what)
        except RecordTimeout:
            continue


def collect(backend: Backend, older_than_s: float, *, apply: bool) -> list[Entry]:
    """Entries that were written longer ago than a reader may take; with `apply` they are deleted.

    Weights of other people that bear the names of records are none, and stay: expired records are read to know that.
    With `apply`, too, what killed writers left half written goes, as at the start of every engine. StorageError.
    """
    oldest = time.time() - older_than_s
    old = [entry for entry in backend.entries() if entry.modified_at < oldest]
    expired = [entry for entry in old if entry.kind == "error" or not _is_foreign(backend, entry.key)]
    if apply:
        for entry in expired:
            backend.discard(entry.key)
        backend.prepare()
    return expired


def _is_foreign(backend: Backend, key: str) -> bool:
    try:
        payload = memoryview(backend.fetch(key, 0))
    except (RecordTimeout, CaptureFailed):
        return False  # gone, or an error marker by now
    return kind_of(lambda num_bytes: bytes(payload[:num_bytes])) == "foreign"


def copy(source: Backend, target: Backend) -> Iterator[Copied]:
    """Copy all records, verified, and the announcement; yields the sums so far after each. Error markers stay.

    Records whose very bytes lie in the target are not written again: a copy that was cut off goes on.

    Raises ConnectorError at the first record that is damaged, or where a store refuses.
    """
    target.prepare()
    facts = source.announcement()
    if facts is not None:
        target.announce(facts)
    there = {entry.key: entry.num_bytes for entry in target.entries() if entry.kind == "record"}
    records = num_bytes = skipped = 0
    for entry in source.entries():
        if entry.kind == "error":
            continue
        try:
            payload = source.fetch(entry.key, 0)
            unpack(payload)
        except RecordTimeout:
            continue  # deleted meanwhile
        except RecordError as error:
            raise ConnectorError(f"record {entry.key}: {error.what}", mend="delete it, and copy again") from error
        if there.get(entry.key) == entry.num_bytes and _holds(target, entry.key, payload):
            skipped += 1
        else:
            target.publish(entry.key, payload)
            records, num_bytes = records + 1, num_bytes + len(payload)
        yield Copied(records, num_bytes, skipped)


def _holds(backend: Backend, key: str, payload: Payload) -> bool:
    """Whether this payload lies there."""
    try:
        return bytearray(backend.fetch(key, 0)) == payload  # a bytearray compares whole, a view byte by byte
    except (RecordTimeout, CaptureFailed):
        return False
