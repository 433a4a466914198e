"""What an artifact says about itself: files with sizes and sha256, producer, meta; and digests of inputs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from speculators_core.errors import StoreError
from speculators_core.types import Json, StrictModel

SCHEMA_VERSION = 1
MANIFEST_NAME = "manifest.json"


class FileEntry(StrictModel):
    """One data file of an artifact."""

    path: str = Field(description="path relative to the data directory, with forward slashes")
    size: int = Field(ge=0, description="bytes")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="hex digest of the content")


class Manifest(StrictModel):
    """Written last: a directory without a valid manifest is not an artifact."""

    kind: str = Field(description="what the artifact is: prepared, states, draft, …")
    schema_version: int = Field(default=SCHEMA_VERSION, description="version of this manifest's layout")
    input_digest: str = Field(description="the cache key: digest of everything that determined the content")
    files: tuple[FileEntry, ...] = Field(description="every data file, sorted by path; nothing else may be there")
    producer: dict[str, str] = Field(default_factory=dict, description="versions of what made it; not in the digest")
    meta: dict[str, Any] = Field(default_factory=dict, description="facts for readers, as JSON; not in the digest")

    @property
    def digest(self) -> str:
        """sha256 of kind, schema version and files: equal bytes give equal digests, wherever they lie."""
        return sha256_json(self.model_dump(mode="json", include={"kind", "schema_version", "files"}))

    @property
    def num_bytes(self) -> int:
        """Size of all data files."""
        return sum(entry.size for entry in self.files)

    def to_json(self) -> str:
        """Indented JSON with sorted keys."""
        return json.dumps(self.model_dump(mode="json"), indent=1, sort_keys=True, allow_nan=False) + "\n"

    @classmethod
    def parse(cls, text: str | bytes, where: str) -> Manifest:
        """Parse manifest.json.

        Raises:
            StoreError: not JSON, not a manifest, or of a schema that this version doesn't know.
        """
        try:
            manifest = cls.model_validate_json(text)
        except ValidationError as error:
            raise StoreError(f"{where} is not a manifest: {error.errors()[0]['msg']}") from error
        if manifest.schema_version != SCHEMA_VERSION:
            raise StoreError(
                f"{where} has manifest schema {manifest.schema_version}; this version reads {SCHEMA_VERSION}",
                mend="open it with the version of draftsmith that wrote it, or let the stage run again",
            )
        if any(unsafe_path(entry.path) for entry in manifest.files):
            raise StoreError(f"{where} names a file outside of its data directory")
        return manifest


def unsafe_path(path: str) -> bool:
    """Whether a manifest's path could leave the data directory."""
    parts = path.split("/")
    return path.startswith("/") or "\\" in path or any(part in ("", ".", "..") for part in parts)


def canonical_json(value: Json | Mapping[str, Any]) -> str:
    """JSON with sorted keys and no spaces; refuses NaN, so that equal values have equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def sha256_json(value: Json | Mapping[str, Any]) -> str:
    """sha256 (hex) of the canonical JSON."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def input_digest(stage: str, version: int, inputs: Mapping[str, Json]) -> str:
    """Cache key of a stage: its name, its hand-bumped version, and digests or settings of its inputs.

    Callers put no path, URL or run id into `inputs`: the same work must have the same key everywhere.
    """
    return sha256_json({"stage": stage, "version": version, "inputs": dict(inputs)})


def sha256_file(path: Path) -> str:
    """sha256 (hex) of a file's bytes, read in blocks of 1 MiB."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
