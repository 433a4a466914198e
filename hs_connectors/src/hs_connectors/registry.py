"""Backends by name, imported only when used.

Another distribution adds one through the entry point group `hs_connectors.backends`
(name = "module:Class"); it cannot replace one of ours.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any, cast

from hs_connectors.contract import Backend, Reader, Writer
from hs_connectors.errors import UnknownName

ENTRY_POINT_GROUP = "hs_connectors.backends"


@dataclass(frozen=True)
class BackendEntry:
    """Where a backend's class is ("module:Class") and what it needs installed."""

    target: str
    install: str


BACKENDS: Mapping[str, BackendEntry] = MappingProxyType(
    {
        "file": BackendEntry("hs_connectors.backends.file:FileBackend", "nothing"),
        "memory": BackendEntry("hs_connectors.backends.memory:MemoryBackend", "nothing"),
        "mooncake": BackendEntry(
            "hs_connectors.backends.mooncake:MooncakeBackend",
            "draftsmith-hs-connectors[mooncake], and Debian's libibverbs1 and librdmacm1",
        ),
        "s3": BackendEntry("hs_connectors.backends.s3:S3Backend", "draftsmith-hs-connectors[s3]"),
        "shm": BackendEntry("hs_connectors.backends.shm:ShmBackend", "nothing"),
    }
)


def open_backend(name: str, config: Mapping[str, Any]) -> Backend:
    """The backend of that name with its configuration.

    Raises UnknownName for a name that nobody registered or a module that is not installed, SettingsError for its
    configuration.
    """
    entry = BACKENDS.get(name) or _third_party(name)
    module, _, attribute = entry.target.partition(":")
    try:
        kind = getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise UnknownName(f"backend {name!r} cannot be imported: {error}", mend=f"install {entry.install}") from error
    return cast(Backend, kind(config))


def open_writer(name: str, config: Mapping[str, Any], codec: str = "none") -> Writer:
    """A writer of records into that backend; makes its store ready."""
    from hs_connectors.wrappers import RecordWriter

    return RecordWriter(open_backend(name, config), codec)


def open_reader(name: str, config: Mapping[str, Any]) -> Reader:
    """A reader of records from that backend; no side effects."""
    from hs_connectors.wrappers import RecordReader

    return RecordReader(open_backend(name, config))


def _third_party(name: str) -> BackendEntry:
    found = list(entry_points(group=ENTRY_POINT_GROUP, name=name))
    if not found:
        raise UnknownName(
            f"no backend is called {name!r}",
            mend=f"use one of {', '.join(sorted(BACKENDS))}, or install a distribution with an entry point in "
            f"{ENTRY_POINT_GROUP}",
        )
    return BackendEntry(found[0].value, found[0].dist.name if found[0].dist else found[0].value)
