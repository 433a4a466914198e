"""The artifact store: every stage's output is a directory with a manifest that was written last."""

from speculators_core.store.files import emptied, file_lock, storage_errors, write_atomic
from speculators_core.store.manifest import (
    FileEntry,
    Manifest,
    canonical_json,
    input_digest,
    sha256_file,
    sha256_json,
)
from speculators_core.store.store import Store

__all__ = [
    "FileEntry",
    "Manifest",
    "Store",
    "canonical_json",
    "emptied",
    "file_lock",
    "input_digest",
    "sha256_file",
    "sha256_json",
    "storage_errors",
    "write_atomic",
]
