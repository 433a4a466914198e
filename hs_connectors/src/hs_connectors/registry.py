"""Backends by name, imported only when used.

Another distribution adds one through the entry point group `hs_connectors.backends`
(name = "module:Class"); it cannot replace one of ours.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any, cast

from hs_connectors.contract import Backend, Reader, Writer
from hs_connectors.errors import SettingsError, UnknownName

ENTRY_POINT_GROUP = "hs_connectors.backends"


@dataclass(frozen=True)
class BackendEntry:
    """Where a backend's class is ("module:Class"), what it needs installed, the option that an address names, and
    whether another process finds the records."""

    target: str
    install: str
    option: str | None = None
    shared: bool = True


BACKENDS: Mapping[str, BackendEntry] = MappingProxyType(
    {
        "file": BackendEntry("hs_connectors.backends.file:FileBackend", "nothing", "root"),
        "memory": BackendEntry("hs_connectors.backends.memory:MemoryBackend", "nothing", "space", shared=False),
        "mooncake": BackendEntry(
            "hs_connectors.backends.mooncake:MooncakeBackend",
            "draftsmith-hs-connectors[mooncake], and Debian's libcurl4, libibverbs1 and librdmacm1",
            "master",
        ),
        "s3": BackendEntry("hs_connectors.backends.s3:S3Backend", "draftsmith-hs-connectors[s3]", "root"),
        "shm": BackendEntry("hs_connectors.backends.shm:ShmBackend", "nothing", "space"),
    }
)
SHARED = tuple(name for name, entry in BACKENDS.items() if entry.shared)
"""Those of ours by which an engine reaches a reader."""


def added_names() -> frozenset[str]:
    """Backends that other distributions add."""
    return frozenset(entry_points(group=ENTRY_POINT_GROUP).names) - BACKENDS.keys()


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


def locate(address: str) -> tuple[str, dict[str, Any]]:
    """Name and configuration of the backend that an address means.

    A directory · `file:DIR` · `shm:SPACE` · `s3://BUCKET/PREFIX` · `mooncake:HOST:PORT` · or any backend with its whole
    configuration, `NAME:{"option": …}`. UnknownName or SettingsError where it is none of these.
    """
    name, colon, rest = address.partition(":")
    if not colon or "/" in name:
        return "file", {"root": address}
    if rest.startswith("{"):
        try:
            return name, dict(json.loads(rest))
        except ValueError as error:
            raise SettingsError(f"the configuration in {address} is not JSON: {error}") from error
    option = (BACKENDS.get(name) or _third_party(name)).option
    if option is None or not rest:
        raise SettingsError(f"{address} does not say where the store is", mend=f'write {name}:{{"option": "value"}}')
    return name, {option: address if name == "s3" else rest}


def _third_party(name: str) -> BackendEntry:
    found = list(entry_points(group=ENTRY_POINT_GROUP, name=name))
    if not found:
        raise UnknownName(
            f"no backend is called {name!r}",
            mend=f"use one of {', '.join(sorted(BACKENDS))}, or install a distribution with an entry point in "
            f"{ENTRY_POINT_GROUP}",
        )
    return BackendEntry(found[0].value, found[0].dist.name if found[0].dist else found[0].value)
