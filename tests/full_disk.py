"""A disk without room for one byte or one new file, for the process of a test."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def full_disk(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within, no file grows (by a limit of the process) and none is made, nor any directory (by a patch of `os`)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    opened = os.open

    def refuse(path: object, *_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def only_what_is_there(path: str, flags: int, mode: int = 0o777, **how: int) -> int:
        if flags & os.O_CREAT and not Path(path).exists():
            refuse(path)
        return opened(path, flags, mode, **how)

    def mkdir(path: str, *_: object, **__: object) -> None:
        if Path(path).is_dir():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        refuse(path)

    with patch.context() as within:
        within.setattr(os, "open", only_what_is_there)
        within.setattr(os, "mkdir", mkdir)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
