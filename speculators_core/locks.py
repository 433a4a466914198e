"""Locks by name, for work that is short: who waits long for one is told of the process that holds it."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from speculators_core.errors import RegistryError
from speculators_core.store.files import file_lock


@contextmanager
def named_lock(directory: Path, name: str, *, timeout_s: float = 120, even_full: bool = False) -> Iterator[None]:
    """Hold `<directory>/<name>.lock` exclusively, as `file_lock` does, but give up after a time.

    Args:
        even_full: as for `file_lock`.

    Raises:
        RegistryError: somebody else held it for `timeout_s`; names the process.
    """
    safe = re.sub(r"[^\w.-]", "_", name)
    if safe != name or len(safe) > 100:
        safe = f"{safe[:80]}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"
    path, deadline = directory / f"{safe}.lock", time.monotonic() + timeout_s

    def give_up() -> None:
        if time.monotonic() >= deadline:
            raise RegistryError(
                f"process {path.read_text() or '(unknown)'} has held {path} for {timeout_s:.0f} s",
                mend="wait for that draftsmith command to end, or stop it; the lock goes with it",
            )

    with file_lock(path, f"the lock {path}", look=give_up, even_full=even_full):
        sign(path)
        yield


def sign(lock: Path) -> None:
    """Say in a lock's file that this process holds it; a full disk may have no room for that."""
    with suppress(OSError):
        lock.write_text(str(os.getpid()))
