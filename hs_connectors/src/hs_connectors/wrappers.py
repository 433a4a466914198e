"""Records over any backend of bytes: the checking writer and the verifying reader.

What needs torch is imported when a record travels: who only asks what an engine announced starts without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hs_connectors.contract import Backend, Handle, Record
from hs_connectors.errors import SettingsError


class RecordWriter:
    """A `Writer` over a backend; prepares the backend's store when it is made."""

    def __init__(self, backend: Backend, codec: str = "none") -> None:
        from hs_connectors.codecs import find_codec

        find_codec(codec)
        self._backend = backend
        self._codec = codec
        backend.prepare()

    def put(self, key: str, record: Record) -> Handle:
        """Check, pack and publish; returns only when the record is visible."""
        from hs_connectors.record import pieces

        handle = Handle(self._backend.name, key)
        self._backend.publish(key, *pieces(record, self._codec))
        return handle

    def fail(self, key: str, message: str) -> None:
        """Publish an error marker under the key."""
        self._backend.fail(key, message)

    def announce(self, facts: Mapping[str, Any]) -> None:
        """Publish what the engine is."""
        self._backend.announce(facts)


class RecordReader:
    """A `Reader` over a backend: waits, then verifies schema and checksum."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def get(self, handle: Handle, timeout_s: float) -> Record:
        """The verified record; errors as in `contract.Reader`."""
        from hs_connectors.record import unpack

        return unpack(self._backend.fetch(self._key(handle), timeout_s))

    def delete(self, handle: Handle) -> None:
        """Remove the record and any error marker."""
        self._backend.discard(self._key(handle))

    def announcement(self) -> dict[str, Any] | None:
        """What the engine said it is, or None."""
        return self._backend.announcement()

    def _key(self, handle: Handle) -> str:
        if handle.backend != self._backend.name:
            raise SettingsError(
                f"a handle of backend {handle.backend!r} given to a reader of {self._backend.name!r}",
                mend="open the reader with the backend that the server was started with",
            )
        return handle.key
