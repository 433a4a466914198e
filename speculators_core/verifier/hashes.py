"""sha256 of large files, remembered by the identity of the file: a second look costs a stat call."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from speculators_core.store.files import remember_text
from speculators_core.store.manifest import sha256_file

log = logging.getLogger(__name__)

CACHE_NAME = "hash-cache.json"
# A file written within this many seconds could change again without its times changing: not remembered yet.
_RACY_SECONDS = 2.0
_THREADS = min(
    8, os.cpu_count() or 1
)  # hashing releases the interpreter's lock: one thread a core, or the disk's speed


_SUMS = TypeAdapter(dict[str, Annotated[str, Field(pattern="^[0-9a-f]{64}$")]])


class HashCache:
    """sha256 by a key that changes with the content; a cache that is lost, torn or not writable only costs time."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._known: dict[str, str] = {}
        self._new: dict[str, str] = {}
        if path and path.is_file():
            try:
                self._known = _SUMS.validate_json(path.read_bytes(), strict=True)
            except (ValidationError, OSError):
                log.warning("ignoring the unreadable hash cache %s", path)

    @classmethod
    def of_home(cls, home: Path | None) -> HashCache:
        """The cache of a state root; without one nothing is remembered."""
        return cls(home / CACHE_NAME if home else None)

    def of(self, file: Path) -> str:
        """sha256 of the file's content in hex."""
        key = file_key(file)
        if key in self._known:
            return self._known[key]
        digest = sha256_file(file)
        stat = file.stat()
        if file_key(file) == key and time.time() - max(stat.st_mtime, stat.st_ctime) > _RACY_SECONDS:
            self.remember(key, digest)
        return digest

    def of_all(self, files: Sequence[Path]) -> list[str]:
        """sha256 of several files in order, hashed side by side."""
        with ThreadPoolExecutor(_THREADS) as pool:
            return list(pool.map(self.of, files))

    def recall(self, key: str) -> str | None:
        """What was remembered under a key of the caller's."""
        return self._known.get(key)

    def remember(self, key: str, digest: str) -> None:
        """Keep a digest under a key that changes with the content; `save` writes it."""
        self._known[key] = self._new[key] = digest

    def save(self) -> None:
        """Merge what is new into the file, by rename; concurrent writers may lose an entry, never tear the file.

        A disk that is full or read-only is logged and costs time later.
        """
        if not self.path or not self._new:
            return
        content = json.dumps({**HashCache(self.path)._known, **self._new}, indent=0, sort_keys=True)
        if remember_text(self.path, content):
            self._new = {}


def file_key(file: Path) -> str:
    """Device, inode, size and both times: unchanged means that nobody wrote to the file."""
    stat = file.stat()
    return f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}"
