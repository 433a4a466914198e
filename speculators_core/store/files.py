"""File-system habits of the store: atomic writes, durable renames, teachable errors, hashing with a cache."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from speculators_core.errors import ConfigError, StoreError, cause_of
from speculators_core.store.manifest import FileEntry, sha256_file

logger = logging.getLogger(__name__)

PARTIAL_SUFFIX = ".part"
"""What ends so is unfinished: left by a killed writer, never published."""

_LOOK_S = 0.2
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FULL_TEXTS = ("No space left on device", "Disk quota exceeded", "File too large", "os error 28", "os error 27")

Stamp = tuple[int, int, int, int]
"""size, mtime (ns), ctime (ns), inode: unchanged means that nobody wrote to the file."""


def disk_full(error: Exception, path: Path | str, doing: str) -> StoreError | None:
    """The StoreError for a full disk (as an OSError or a safetensors error), naming path and cure; None for others."""
    number = error.errno if isinstance(error, OSError) else None
    if number not in _FULL and not any(text in str(error) for text in _FULL_TEXTS):
        return None
    return StoreError(
        f"the disk is full while {doing}: {path}",
        mend="free space there (or point DRAFTSMITH_HOME at a larger disk) and run the same command again; "
        "what was finished is kept",
    )


@contextlib.contextmanager
def storage_errors(path: Path | str, doing: str) -> Iterator[None]:
    """Turns a full disk, and every other OSError of the block, into a StoreError; everything else passes."""
    try:
        yield
    except Exception as error:
        known = disk_full(error, path, doing)
        if known is None and isinstance(error, OSError):
            known = StoreError(
                f"cannot go on while {doing}: {path}: {error.strerror or error}",
                mend="check that the directory exists and is writable (or point DRAFTSMITH_HOME at one that is), then "
                "run the same command again",
            )
        if known is not None:
            raise known from error
        raise


def write_atomic(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` with a temporary sibling, make it durable, and rename it to `path`: all or nothing.

    Raises:
        StoreError: the disk is full or not writable; nothing is left behind.
    """
    partial = _partial(path)
    try:
        with storage_errors(path, "writing"):
            write(partial)
            sync(partial)
            partial.replace(path)
            sync(path.parent)
    finally:
        with contextlib.suppress(OSError):  # what forbade the writing forbids this too, and is told already
            partial.unlink()


def require_new(path: Path) -> None:
    """See, before long work, that a file or directory can be made there in the end; its parent is made.

    Raises:
        ConfigError: something is there already, or it cannot be made.
    """
    if os.path.lexists(path):
        raise ConfigError(f"{path} exists already", mend="name one that does not exist yet, or move that away")
    require_place(path)


def require_place(path: Path) -> None:
    """See, before long work, that a file can be written there in the end, be it in another's place.

    Raises:
        ConfigError: it is a directory, or nothing can be made there.
    """
    probe = _partial(path)
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        path.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}", mend="name another place") from error


def remember_text(path: Path, text: str) -> bool:
    """Write what only spares work later; where that cannot be done the log says so, and the answer is False."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, lambda partial: partial.write_text(text, encoding="utf-8"))
    except (OSError, StoreError) as error:
        logger.warning("not remembered: %s", cause_of(error))
        return False
    return True


def no_room(error: OSError) -> bool:
    """Whether it is a full disk, or a quota."""
    return error.errno in _FULL


def may_not_write(error: OSError) -> bool:
    """Whether it is a place that this user may only read."""
    return error.errno in (errno.EROFS, errno.EACCES, errno.EPERM)


def write_directory(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` with a temporary sibling that it makes a directory, and rename that to `path`: all or nothing.

    Raises:
        StoreError: the disk is full or not writable; nothing is left behind.
    """
    partial = _partial(path.with_name(f".{path.name}"))
    try:
        with storage_errors(path, "writing"):
            path.parent.mkdir(parents=True, exist_ok=True)
            write(partial)
            partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _partial(path: Path) -> Path:
    """A sibling that no other process and no other call has."""
    return path.with_name(f"{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}{PARTIAL_SUFFIX}")


def sync(path: Path) -> None:
    """fsync of a file or directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def data_files(directory: Path) -> list[str]:
    """Relative paths of all files below a directory, sorted.

    Raises:
        StoreError: a symbolic link or a special file is among them (its target could change unseen).
    """
    found = []
    for path in directory.rglob("*"):
        relative = path.relative_to(directory).as_posix()
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise StoreError(
                f"{relative} in {directory} is not a plain file",
                mend="replace links by the files that they point to: an artifact must hold its own bytes",
            )
        if path.is_file():
            found.append(relative)
    return sorted(found)


def emptied(directory: Path) -> Path:
    """The directory, without what an earlier try left in it: for work that cannot go on from there."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def drop_partials(directory: Path) -> None:
    """Delete what killed writers left unfinished: files and directories."""
    for path in [*directory.rglob(f"*{PARTIAL_SUFFIX}")]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def stamp(path: Path) -> Stamp:
    """The file's stat facts that change whenever somebody writes to it."""
    facts = path.stat()
    return facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino


def hash_files(directory: Path, paths: Sequence[str]) -> tuple[FileEntry, ...]:
    """Sizes and sha256 of files, hashed on a few threads (hashing releases the interpreter's lock)."""

    def entry(path: str) -> FileEntry:
        return FileEntry(path=path, size=(directory / path).stat().st_size, sha256=sha256_file(directory / path))

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        return tuple(pool.map(entry, paths))


class VerifiedCache:
    """Remembers which files of an artifact were hashed, by stat facts, so that a second look costs only stat calls.

    One JSON file in the scratch directory; losing it costs a rehash, never correctness.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self, digest: str) -> dict[str, list[int] | str]:
        """path -> stamp of the files that were verified for the artifact of this digest; empty when unknown."""
        try:
            content = json.loads(self._path.read_text())
            files = content["files"] if content["digest"] == digest else {}
        except (OSError, ValueError, KeyError, TypeError):
            return {}
        return files if isinstance(files, dict) else {}

    def save(self, digest: str, files: dict[str, list[int] | str]) -> None:
        """Replace what is remembered; a failure only costs time later, so it is logged and not raised."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            content = json.dumps({"digest": digest, "files": files})
            write_atomic(self._path, lambda partial: partial.write_text(content))
        except (OSError, StoreError) as error:
            logger.debug("verification cache %s not written: %s", self._path, error)


def open_lock(path: Path) -> int:
    """Descriptor of a lock file, made where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)


@contextlib.contextmanager
def file_lock(
    path: Path,
    waiting_for: str,
    *,
    shared: bool = False,
    look: Callable[[], None] | None = None,
    even_full: bool = False,
) -> Iterator[None]:
    """Flock that dies with its holder (also on kill -9). Not reentrant. The file stays; its holder may delete it.

    Side effect: blocks until the holder is done, and says so in the log once.

    Args:
        shared: beside others that share it, and apart from whoever does not.
        look: called now and then while it waits; what it raises ends the wait.
        even_full: go on without the lock where a full disk has no room for its file: for who only reads or deletes.

    Raises:
        StoreError: the lock file cannot be made.
    """
    mode = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    while True:
        descriptor = _lock_file(path, even_full=even_full)
        if descriptor is None:
            logger.warning("the disk is full, and has no room for a lock: nothing keeps others off %s", waiting_for)
            yield
            return
        try:
            _wait_for_lock(descriptor, mode, waiting_for, look)
            if _lies_at(descriptor, path):
                yield
                return
        finally:  # where its holder deleted the file meanwhile, nobody else would meet us at it: once more
            os.close(descriptor)


def _lock_file(path: Path, *, even_full: bool) -> int | None:
    """Descriptor of a lock file; None where `even_full` and there is no room for one."""
    with storage_errors(path, "taking a lock"):
        try:
            return open_lock(path)
        except OSError as error:
            if not even_full or not no_room(error):
                raise
    return None


def _wait_for_lock(descriptor: int, mode: int, waiting_for: str, look: Callable[[], None] | None) -> None:
    if _taken(descriptor, mode):
        return
    logger.info("waiting for another process: %s", waiting_for)
    started = time.monotonic()
    if look is None:
        fcntl.flock(descriptor, mode)
    else:
        while not _taken(descriptor, mode):
            look()
            time.sleep(_LOOK_S)
    logger.info("the other process is done after %.0f s: %s", time.monotonic() - started, waiting_for)


def _lies_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _taken(descriptor: int, mode: int) -> bool:
    """Take the lock if nobody holds it."""
    try:
        fcntl.flock(descriptor, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def discard(path: Path, trash: Path) -> None:
    """Move a directory out of sight at once, then delete it: nobody meets it half deleted.

    A full disk may have no room for that move: then it is deleted where it is.
    """
    grave = trash / uuid.uuid4().hex
    try:
        trash.mkdir(parents=True, exist_ok=True)
        path.rename(grave)
    except FileNotFoundError:
        return
    except OSError as error:
        if not no_room(error):
            raise
        grave = path
    shutil.rmtree(grave, ignore_errors=True)
