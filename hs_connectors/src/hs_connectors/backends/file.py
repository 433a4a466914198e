"""Records as files of one directory, on a file system that engine and reader share.

Configuration: `root` (directory), `fsync` (default true).
    <key>.safetensors    a record           engine.json    what the engine is
    <key>.error.json     an error marker    .<…>.part      being written (its writer holds a lock on it)
Keys hold no dots and no slashes and links are never followed, so nothing escapes the root. What is no regular file, or
was not written here, is other people's: it is neither waited for nor deleted.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from hs_connectors.backends._ownership import OWN_PLACE, error_of, refuse_foreign
from hs_connectors.backends._waiting import await_payload
from hs_connectors.contract import Entry, Payload, check_key, is_key, size_of
from hs_connectors.errors import CaptureFailed, EntryError, SettingsError, StorageError

log = logging.getLogger(__name__)
T = TypeVar("T")
_ENGINE = "engine.json"
_RECORD, _ERROR = ".safetensors", ".error.json"
_PART = re.compile(r"\..+\.(safetensors|json|probe)\.[0-9a-f]{16}\.part")
_PAUSES_S = (0.001, 0.05)
_STRETCH = 2 << 20
"""Bytes written between two hints to the disk."""
_YOUNG_S = 60.0
"""A `.part` younger than this may belong to a writer that has not locked it yet."""


class FileBackend:
    """Publishes by temporary file, fsync and rename."""

    name: ClassVar[str] = "file"

    def __init__(self, config: Mapping[str, Any]) -> None:
        unknown = set(config) - {"root", "fsync"}
        if unknown or not config.get("root") or not isinstance(config["root"], str | os.PathLike):
            raise SettingsError(f"the file backend takes root (a directory) and fsync, got {dict(config)!r}")
        self._root = Path(str(config["root"])).absolute()
        self._fsync = bool(config.get("fsync", True))

    def prepare(self) -> None:
        """Create the root, prove that it can be written, remove what killed writers left."""
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            self._write(f".{secrets.token_hex(8)}.probe", b"")
            for leftover in self._root.glob(".*.part"):
                if _PART.fullmatch(leftover.name):
                    _remove_if_orphan(leftover)
        except OSError as error:
            raise self._refused("cannot be written", error) from error

    def publish(self, key: str, *pieces: Payload) -> None:
        """Write beside, then rename into place."""
        try:
            self._write(check_key(key) + _RECORD, *pieces)
        except OSError as error:
            raise self._refused(f"refused record {key} of {size_of(pieces)} bytes", error) from error

    def fail(self, key: str, message: str) -> None:
        """Publish `<key>.error.json`; on a full disk an empty one, which needs no data block."""
        name = check_key(key) + _ERROR
        marker = json.dumps({"error": message}).encode()
        for content in (marker, marker, b""):
            try:
                self._write(name, content)
                return
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not content:
                    raise self._refused(f"refused even the error marker of {key}", error) from error
                time.sleep(_PAUSES_S[1])  # another writer's failed file may free a block meanwhile

    def fetch(self, key: str, timeout_s: float) -> Payload:
        """Poll for the record or the marker, from every millisecond to every 50."""
        record, marker = check_key(key) + _RECORD, key + _ERROR

        def look() -> Payload | None:
            payload = self._read(record)
            if payload is None and (error := self._read(marker)) is not None:
                raise CaptureFailed(f"record {key} in {self._root}: {self._message(marker, bytes(error))}")
            return payload

        return await_payload(look, timeout_s, _PAUSES_S, f"record {key} of {self._root}")

    def discard(self, key: str) -> None:
        """Unlink the record and its marker; EntryError for anything else that bears the name of one."""
        record, marker = check_key(key) + _RECORD, key + _ERROR
        where = str(self._root / record)
        self._look(record, lambda file, _: refuse_foreign(where, lambda num_bytes: os.pread(file, num_bytes, 0)))
        self._look(marker, lambda file, num_bytes: self._message(marker, os.pread(file, num_bytes, 0)))
        try:
            for name in (record, marker):
                (self._root / name).unlink(missing_ok=True)
        except OSError as error:
            raise self._refused(f"refused to delete record {key}", error, EntryError) from error

    def entries(self) -> Iterator[Entry]:
        """Records and markers among the directory's files."""
        try:
            names = sorted(path.name for path in self._root.iterdir())
        except FileNotFoundError:
            return
        except OSError as error:
            raise self._refused("cannot be listed", error) from error
        records = {name.removesuffix(_RECORD) for name in names if name.endswith(_RECORD)}
        for name in names:
            is_record = name.endswith(_RECORD)
            key = name.removesuffix(_RECORD if is_record else _ERROR)
            if not is_key(key) or key == name or (not is_record and key in records):
                continue
            try:
                found = (self._root / name).lstat()
            except FileNotFoundError:
                continue  # deleted meanwhile
            yield Entry(key, "record" if is_record else "error", found.st_size if is_record else 0, found.st_mtime)

    def announce(self, facts: Mapping[str, Any]) -> None:
        """Write `engine.json`."""
        try:
            self._write(_ENGINE, json.dumps(facts, indent=2, sort_keys=True).encode())
        except OSError as error:
            raise self._refused(f"refused {_ENGINE}", error) from error

    def announcement(self) -> dict[str, Any] | None:
        """Read `engine.json`."""
        content = self._read(_ENGINE)
        if content is None:
            return None
        try:
            return dict(json.loads(bytes(content)))
        except (ValueError, TypeError, RecursionError) as error:
            raise StorageError(f"{self._root / _ENGINE} is not a JSON object: {error}") from error

    def _write(self, name: str, *pieces: Payload) -> None:
        part = self._root / f".{name}.{secrets.token_hex(8)}.part"
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # dies with us: how a sweep knows the living
            self._fill(descriptor, pieces)
            if self._fsync and any(pieces):
                os.fsync(descriptor)
            if name.endswith(".probe"):
                part.unlink()
            else:
                part.rename(self._root / name)
        except OSError:
            part.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)

    def _fill(self, descriptor: int, pieces: Iterable[Payload]) -> None:
        """Write the pieces; a disk that has to be waited for begins meanwhile."""
        written = begun = 0
        for piece in pieces:
            rest = memoryview(piece)
            while rest:
                count = os.write(descriptor, rest[:_STRETCH] if self._fsync else rest)
                rest, written = rest[count:], written + count
                if self._fsync and (whole := written // _STRETCH * _STRETCH) > begun:
                    # Dirty pages cannot be dropped: Linux starts to write them, and keeps them.
                    os.posix_fadvise(descriptor, begun, whole - begun, os.POSIX_FADV_DONTNEED)
                    begun = whole

    def _read(self, name: str) -> Payload | None:
        """The file's content, or None where there is no such file."""
        return self._look(name, self._content)

    def _look(self, name: str, use: Callable[[int, int], T]) -> T | None:
        """What `use` makes of a file's descriptor and size; None where there is no such file, EntryError for others."""
        try:
            descriptor, facts = _open_regular(self._root / name)
            try:
                return use(descriptor, facts.st_size)
            finally:
                os.close(descriptor)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._refused(f"refused to read {name}", error, EntryError) from error

    def _message(self, name: str, marker: bytes) -> str:
        """Why there is no record; EntryError where the marker is not ours."""
        text = error_of(marker) if marker else "the engine could not say why; its disk may be full"
        if text is None:
            raise EntryError(f"{self._root / name} is no error marker of ours: it is not deleted", mend=OWN_PLACE)
        return text

    def _content(self, descriptor: int, num_bytes: int) -> Payload:
        """Read whole into memory that may be written: tensors lie in it."""
        content = _fresh(num_bytes)
        with os.fdopen(descriptor, "rb", buffering=0, closefd=False) as file:
            rest = memoryview(content)
            while rest and (count := file.readinto(rest)):
                rest = rest[count:]
        return memoryview(content)[: len(content) - len(rest)]  # shorter where somebody has cut it meanwhile

    def _refused(self, what: str, error: OSError, kind: type[StorageError] = StorageError) -> StorageError:
        mend = {
            errno.ENOSPC: "free some space, or name a root on a larger disk",
            errno.EDQUOT: "raise the quota, or name another root",
            errno.EROFS: "mount it for writing, or name another root",
            errno.EACCES: "let the engine's user write there, or name another root",
            errno.ELOOP: "records are never symbolic links: somebody put one there; move it away",
            errno.ENXIO: "records are regular files: somebody put something else there; move it away",
        }.get(error.errno or 0)
        return kind(f"the store {self._root} {what}: {error.strerror or error}", mend=mend)


def _open_regular(path: Path) -> tuple[int, os.stat_result]:
    """Descriptor and facts of a regular file; OSError for all else, at once: a pipe would have to be waited for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode):
        os.close(descriptor)
        raise OSError(errno.ENXIO, "it is no regular file")
    return descriptor, facts


def _remove_if_orphan(part: Path) -> None:
    try:
        descriptor, facts = _open_regular(part)
    except OSError:
        return  # renamed or removed meanwhile, or no file of ours
    try:
        if time.time() - facts.st_mtime < _YOUNG_S:
            return
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        part.unlink(missing_ok=True)
        log.info("removed leftover of a killed writer file=%s", part.name)
    except BlockingIOError:
        pass  # its writer lives
    finally:
        os.close(descriptor)


def _fresh(num_bytes: int) -> bytearray:
    """A bytearray whose content is anything: zeros that are overwritten at once cost a third of a read."""
    make = ctypes.pythonapi.PyByteArray_FromStringAndSize
    make.restype, make.argtypes = ctypes.py_object, (ctypes.c_char_p, ctypes.c_ssize_t)
    made: bytearray = make(None, num_bytes)
    return made
