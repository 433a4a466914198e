"""A verifier below an fsspec URL: s3://bucket/prefix, gs://, memory://, …"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from speculators_core.errors import VerifierError
from speculators_core.store.files import file_lock, storage_errors
from speculators_core.verifier.hashes import HashCache

_BLOCK = 8 << 20
_STREAMS = 8


class UrlFiles:
    """Objects below a prefix. A hash is remembered by the object's size, times and ETag: no second download."""

    def __init__(self, url: str, *, home: Path | None) -> None:
        import fsspec

        self._url = url.rstrip("/")
        self._home = home
        self._hashes = HashCache.of_home(home)
        try:
            self._fs, root = fsspec.core.url_to_fs(self._url)
        except (ImportError, ValueError) as error:
            raise VerifierError(
                f"the verifier's address {url} cannot be used: {error}",
                mend="install the fsspec package of that protocol, or name a directory or a hub id",
            ) from error
        self._root = root.rstrip("/")
        self._listing = self._list()
        if "config.json" not in self._listing:
            raise VerifierError(
                f"{self._url} is not a verifier: it has no config.json",
                mend="name the prefix that holds config.json and model.safetensors",
            )

    @property
    def where(self) -> str:
        """The URL."""
        return self._url

    def names(self) -> frozenset[str]:
        """Objects below the prefix."""
        return frozenset(self._listing)

    def read(self, name: str) -> bytes:
        """Content of an object."""
        with self._answers(name):
            content: bytes = self._fs.cat_file(f"{self._root}/{name}")
            return content

    def read_range(self, name: str, start: int, length: int) -> bytes:
        """Part of an object."""
        with self._answers(name):
            content: bytes = self._fs.cat_file(f"{self._root}/{name}", start=start, end=start + length)
            return content

    def sha256(self, names: Sequence[str]) -> list[str]:
        """sha256 of objects, streamed side by side; nothing is kept on disk."""
        with ThreadPoolExecutor(_STREAMS) as pool:
            found = list(pool.map(self._sha256, names))
        self._hashes.save()
        return found

    def stamp(self) -> str:
        """The prefix listed anew."""
        return repr(sorted(self._list().items()))

    def local(self, *, weights: bool) -> Path:
        """A copy under the state root, named by the listing: a changed prefix gets another one."""
        assert self._home is not None, "nowhere to keep a copy"
        name = hashlib.sha256(f"{self._url} {sorted(self._listing.items())}".encode()).hexdigest()[:32]
        target = self._home / "verifiers" / name
        with file_lock(self._home / "locks" / f"verifier-{name}.lock", f"the copy of {self._url}"):
            for file in sorted(self._listing):
                path = target / file
                if path.exists() or (is_large(file) and not weights):
                    continue
                with storage_errors(path, "fetching the verifier"), self._answers(file):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    partial = path.with_name(f"{path.name}.part")
                    self._fs.get_file(f"{self._root}/{file}", str(partial))
                    partial.replace(path)
        return target

    def _sha256(self, name: str) -> str:
        key = f"{self._url}/{name} {self._listing[name]}"
        known = self._hashes.recall(key)
        if known is not None:
            return known
        digest = hashlib.sha256()
        with self._answers(name), self._fs.open(f"{self._root}/{name}", "rb", block_size=_BLOCK) as stream:
            while block := stream.read(_BLOCK):
                digest.update(block)
        self._hashes.remember(key, digest.hexdigest())
        return digest.hexdigest()

    def _list(self) -> dict[str, str]:
        with self._answers(""):
            self._fs.invalidate_cache()
            try:
                found: dict[str, dict[str, Any]] = self._fs.find(self._root, detail=True)
            except FileNotFoundError:
                found = {}
        listing = {
            path.lstrip("/").removeprefix(self._root.lstrip("/")).lstrip("/"): _identity(info)
            for path, info in found.items()
        }
        if outside := sorted(name for name in listing if ".." in name.split("/")):  # a key may hold anything
            raise VerifierError(
                f"{self._url} has an object whose copy would lie elsewhere: {outside[0]}", mend="remove or rename it"
            )
        return listing

    @contextmanager
    def _answers(self, name: str) -> Iterator[None]:
        """Turn whatever a file system raises into a VerifierError."""
        try:
            yield
        except VerifierError:
            raise
        except Exception as error:
            raise VerifierError(
                f"{self._url}/{name} cannot be read: {error}",
                mend="check the address, the credentials and the network, then run the same command again",
            ) from error


def is_large(name: str) -> bool:
    """Whether a file holds weights."""
    return name.endswith((".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"))


def _identity(info: dict[str, Any]) -> str:
    versions = (info.get(key) for key in ("ETag", "etag", "LastModified", "mtime", "created", "updated"))
    return ":".join(str(fact) for fact in (info["size"], *versions) if fact is not None)
