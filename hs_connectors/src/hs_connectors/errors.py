"""Every error of this distribution, as one tree.

    ConnectorError
    ├── SettingsError        a capture setting, key, handle or backend option is wrong
    │   └── UnknownName      no such backend or codec; says which exist and what to install
    ├── RecordError          the bytes are not a whole record of this schema
    │   ├── RecordCorrupt    the checksum does not match
    │   └── RecordNotFinite  states hold NaN or infinity: refused before writing
    ├── StorageError         the store refused a read or a write (full, read-only, gone)
    │   └── EntryError       one entry can be neither read nor deleted (no file, not ours): the others may be
    ├── CaptureFailed        the writer published an error instead of the record
    └── RecordTimeout        neither a record nor an error appeared in time

Each message says what is wrong and where; `mend` says what can be done about it.
"""

from __future__ import annotations


class ConnectorError(Exception):
    """Base of every error raised by hs_connectors.

    Args:
        what: what is wrong and where, in one sentence.
        mend: what can be done about it.
    """

    def __init__(self, what: str, *, mend: str | None = None) -> None:
        super().__init__(what if mend is None else f"{what}\n  mend: {mend}")
        self.what = what
        self.mend = mend


class SettingsError(ConnectorError):
    """A capture setting, key, handle or backend option is wrong."""


class UnknownName(SettingsError):
    """No backend or codec has this name, or what it needs is not installed."""


class RecordError(ConnectorError):
    """The bytes are not a whole record of a known schema."""


class RecordCorrupt(RecordError):
    """A record's checksum does not match its bytes."""


class RecordNotFinite(RecordError):
    """Hidden states hold NaN or infinity."""


class StorageError(ConnectorError):
    """A backend's store refused a read or a write."""


class EntryError(StorageError):
    """One entry of a store is nothing that its backend wrote, or cannot be read or deleted; the others may be."""


class CaptureFailed(ConnectorError):
    """The writer published an error marker in place of the record."""


class RecordTimeout(ConnectorError):
    """Neither a record nor an error marker appeared in time."""
