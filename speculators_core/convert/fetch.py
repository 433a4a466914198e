"""Where a conversion's two sides come from: a directory, or a hub's snapshot when an id is named."""

from __future__ import annotations

from pathlib import Path

from speculators_core.convert.source import Source
from speculators_core.errors import ConfigError
from speculators_core.verifier.files import HUB_ID, open_verifier


def fetch_source(location: str, *, home: Path, allow_bin: bool) -> Source:
    """A draft's checkpoint; of a hub's, config and safetensors are fetched, never pickles.

    Raises:
        ConfigError, VerifierError: neither a directory nor a hub's id; the hub is away.
    """
    directory = Path(location).expanduser()
    if directory.is_dir():
        return Source(directory, allow_bin)
    if HUB_ID.match(location) is None:
        raise ConfigError(f"there is no draft at {location}", mend="name a directory or a hub id, OWNER/NAME@REVISION")
    return Source(open_verifier(location, home=home).local(weights=True), allow_bin)


def fetch_verifier(location: str | None, source: Source, *, home: Path) -> tuple[Path | None, str | None]:
    """The verifier's directory, and what the draft shall call it where its checkpoint does not say.

    Where none is named, the checkpoint may name a directory of this machine.
    """
    section = source.config.get("speculators_config") or {}
    stated = (section.get("verifier") or {}).get("name_or_path")
    if location is None:
        directory = Path(str(stated)) if stated else None
        return (directory if directory is not None and directory.is_dir() else None), None
    found = open_verifier(location, home=home).local(weights=True)
    if stated:
        return found, None
    hub = HUB_ID.match(location)
    return found, hub["id"] if hub and not Path(location).expanduser().exists() else str(found)
