"""Records in this host's shared memory: files of /dev/shm that readers map, without a disk between.

Configuration: `space` (name; engine and reader use the same), `max_bytes` (most bytes of records; default half of
/dev/shm), `full_timeout_s` (how long a writer waits for readers to make room before the record fails; default 60).
Layout and atomicity are those of the file backend, below /dev/shm/draftsmith-<space>, for one user only.
"""

from __future__ import annotations

import mmap
import os
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from hs_connectors.backends.file import FileBackend
from hs_connectors.contract import Payload, size_of
from hs_connectors.errors import SettingsError, StorageError

_SHARED = Path("/dev/shm")
_SPACE = re.compile(r"[A-Za-z0-9_-]{1,64}")
_FULL_TIMEOUT_S = 60.0
_PAUSE_S = 0.01


class ShmBackend(FileBackend):
    """Publishes by write and rename within a bound; a fetch maps the record and copies nothing."""

    name: ClassVar[str] = "shm"

    def __init__(self, config: Mapping[str, Any]) -> None:
        space = config.get("space")
        if set(config) - {"space", "max_bytes", "full_timeout_s"} or not isinstance(space, str):
            raise SettingsError(f"the shm backend takes space, max_bytes and full_timeout_s, got {dict(config)!r}")
        if _SPACE.fullmatch(space) is None:
            raise SettingsError(f"not a space: {space!r}", mend="a space is 1 to 64 of A-Z a-z 0-9 _ -")
        super().__init__({"root": str(_SHARED / f"draftsmith-{space}"), "fsync": False})
        self._max_bytes = int(config.get("max_bytes") or 0)
        self._full_timeout_s = float(config.get("full_timeout_s", _FULL_TIMEOUT_S))
        if self._max_bytes < 0 or self._full_timeout_s < 0:
            raise SettingsError(f"max_bytes and full_timeout_s cannot be negative, got {dict(config)!r}")
        self._lock = threading.Lock()
        self._used = 0  # published by us since the last look, and what lay there then: never less than the truth
        self._on_its_way = 0

    def prepare(self) -> None:
        """As the file backend; the directory must be this user's alone."""
        try:
            self._root.mkdir(mode=0o700, exist_ok=True)
            owner = self._root.lstat()
        except OSError as error:
            raise self._refused("cannot be made", error) from error
        if owner.st_uid != os.geteuid() or not self._root.is_dir() or self._root.is_symlink():
            raise StorageError(f"{self._root} belongs to another user", mend="choose another space")
        super().prepare()
        if not self._max_bytes:
            shared = os.statvfs(_SHARED)
            self._max_bytes = shared.f_frsize * shared.f_blocks // 2
        self._used = self._measure()

    def publish(self, key: str, *pieces: Payload) -> None:
        """Wait for room within the bound, then write."""
        num_bytes = size_of(pieces)
        self._await_room(key, num_bytes)
        try:
            super().publish(key, *pieces)
        finally:
            with self._lock:
                self._on_its_way -= num_bytes
                self._used += num_bytes

    def _await_room(self, key: str, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise StorageError(
                f"record {key} of {num_bytes} bytes is larger than the whole space of {self._max_bytes}",
                mend="raise max_bytes, and /dev/shm itself (docker: --shm-size)",
            )
        deadline = time.monotonic() + self._full_timeout_s
        while True:
            with self._lock:
                if self._used + self._on_its_way + num_bytes > self._max_bytes:
                    self._used = self._measure()
                if self._used + self._on_its_way + num_bytes <= self._max_bytes:
                    self._on_its_way += num_bytes
                    return
            if time.monotonic() > deadline:
                raise StorageError(
                    f"the space {self._root} stayed full ({self._used} of {self._max_bytes} bytes) for "
                    f"{self._full_timeout_s:g} s",
                    mend="do its readers live, and delete what they have read? `draftsmith hs gc` clears what is left",
                )
            time.sleep(_PAUSE_S)

    def _measure(self) -> int:
        return sum(entry.num_bytes for entry in self.entries())

    def _content(self, descriptor: int, num_bytes: int) -> Payload:
        """The pages themselves; private ones where a reader writes, and valid after a delete."""
        if not num_bytes:
            return b""  # what cannot be mapped
        return memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY))
