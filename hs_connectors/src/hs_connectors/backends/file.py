"""Records as files of one directory, on a file system that engine and reader share.

Configuration: `root` (directory), `fsync` (default true).
    <key>.safetensors    a record           engine.json    what the engine is
    <key>.error.json     an error marker    .<…>.part      being written (its writer holds a lock on it)
Keys hold no dots and no slashes and links are never followed, so nothing escapes the root.
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
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from hs_connectors.backends._ownership import refuse_foreign
from hs_connectors.backends._waiting import await_payload
from hs_connectors.contract import Entry, Payload, check_key, is_key, size_of
from hs_connectors.errors import CaptureFailed, SettingsError, StorageError

log = logging.getLogger(__name__)
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
                raise CaptureFailed(f"record {key} in {self._root}: {_message(bytes(error))}")
            return payload

        return await_payload(look, timeout_s, _PAUSES_S, f"record {key} of {self._root}")

    def discard(self, key: str) -> None:
        """Unlink the record and its marker; StorageError for weights of anybody's that bear the name of one."""
        try:
            self._refuse_foreign(self._root / (check_key(key) + _RECORD))
            for name in (key + _RECORD, key + _ERROR):
                (self._root / name).unlink(missing_ok=True)
        except OSError as error:
            raise self._refused(f"refused to delete record {key}", error) from error

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
            facts: dict[str, Any] = json.loads(bytes(content))
        except ValueError as error:
            raise StorageError(f"{self._root / _ENGINE} is not JSON: {error}") from error
        return facts

    def _refuse_foreign(self, path: Path) -> None:
        if path.is_symlink() or not path.is_file():
            return
        with suppress(FileNotFoundError), path.open("rb") as file:
            refuse_foreign(str(path), lambda num_bytes: os.pread(file.fileno(), num_bytes, 0))

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
        try:
            descriptor = os.open(self._root / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._refused(f"refused to read {name}", error) from error
        try:
            return self._content(descriptor)
        except OSError as error:
            raise self._refused(f"refused to read {name}", error) from error
        finally:
            os.close(descriptor)

    def _content(self, descriptor: int) -> Payload:
        """Read whole into memory that may be written: tensors lie in it."""
        content = _fresh(os.fstat(descriptor).st_size)
        with os.fdopen(descriptor, "rb", buffering=0, closefd=False) as file:
            rest = memoryview(content)
            while rest and (count := file.readinto(rest)):
                rest = rest[count:]
        return memoryview(content)[: len(content) - len(rest)]  # shorter where somebody has cut it meanwhile

    def _refused(self, what: str, error: OSError) -> StorageError:
        mend = {
            errno.ENOSPC: "free some space, or name a root on a larger disk",
            errno.EDQUOT: "raise the quota, or name another root",
            errno.EROFS: "mount it for writing, or name another root",
            errno.EACCES: "let the engine's user write there, or name another root",
            errno.ELOOP: "records are never symbolic links: somebody put one there; remove it",
        }.get(error.errno or 0)
        return StorageError(f"the store {self._root} {what}: {error.strerror or error}", mend=mend)


def _remove_if_orphan(part: Path) -> None:
    try:
        descriptor = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return  # renamed or removed meanwhile, or a link: not ours to judge
    try:
        if time.time() - os.fstat(descriptor).st_mtime < _YOUNG_S:
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


def _message(marker: bytes) -> str:
    try:
        return str(json.loads(marker)["error"])
    except (ValueError, KeyError, TypeError):
        return "the engine failed to write it and could not say why; its disk may be full"
