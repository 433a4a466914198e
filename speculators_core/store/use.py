"""Who uses an artifact: shared flocks that die with their holder, so that a sweep never takes what somebody reads."""

from __future__ import annotations

import contextlib
import fcntl
import os
import weakref
from collections.abc import Iterator
from pathlib import Path

from speculators_core.store.files import may_not_write, no_room, open_lock, storage_errors


def lock_file(locks: Path, name: str, purpose: str) -> Path:
    """The lock of an artifact (`kind/key`) for a purpose: flight, publish, download or use."""
    return locks / f"{name.replace('/', '-')}.{purpose}.lock"


class Uses:
    """The artifacts that one store object has handed out; they count as in use while it lives."""

    def __init__(self, locks: Path) -> None:
        """`locks`: directory of the lock files."""
        self._locks = locks
        self._held: dict[str, int] = {}
        weakref.finalize(self, _close, self._held)

    def begin(self, name: str) -> None:
        """Hold the artifact's lock, shared, from now on, and note the time; waits out a deletion.

        Where this user may only read, nothing is noted: whoever may write there deletes what he wants.
        """
        if name not in self._held:
            path = lock_file(self._locks, name, "use")
            with storage_errors(path, "noting that an artifact is in use"):
                try:
                    descriptor = open_lock(path)
                except OSError as error:
                    if may_not_write(error):
                        return
                    raise
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            self._held[name] = descriptor
        os.utime(self._held[name])


@contextlib.contextmanager
def only_holder(*paths: Path, create: bool = True) -> Iterator[bool]:
    """Hold several locks exclusively, if nobody else holds any of them: True; else False, and none is held.

    Without `create` a lock file that is not there is nobody's: a mere look leaves no file, whose time would count as
    a use. Nor is one that a full disk has no room for.
    """
    held: dict[str, int] = {}
    free = True
    try:
        for path in paths if create else [path for path in paths if path.exists()]:
            try:
                held[str(path)] = open_lock(path) if create else os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                if not no_room(error):
                    raise
                continue
            try:
                fcntl.flock(held[str(path)], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _close(held)
                free = False
                break
        yield free
    finally:
        _close(held)


def _close(descriptors: dict[str, int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])
