"""Locks between processes that die with their holder."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from speculators_core.errors import RegistryError


@contextmanager
def file_lock(directory: Path, name: str, *, timeout_s: float = 120) -> Iterator[None]:
    """Hold `<directory>/<name>.lock` exclusively; the kernel frees it when the holder ends, however it ends.

    Raises:
        RegistryError: somebody else held it for `timeout_s`; names the process.
    """
    directory.mkdir(parents=True, exist_ok=True)
    safe = re.sub(r"[^\w.-]", "_", name)
    if safe != name or len(safe) > 100:
        safe = f"{safe[:80]}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"
    with (directory / f"{safe}.lock").open("a+") as stream:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    stream.seek(0)
                    raise RegistryError(
                        f"process {stream.read()} has held {stream.name} for {timeout_s:.0f} s",
                        mend="wait for that draftsmith command to end, or stop it; the lock goes with it",
                    ) from None
                time.sleep(0.05)
        stream.truncate(0)
        stream.write(str(os.getpid()))
        stream.flush()
        yield
