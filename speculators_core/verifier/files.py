"""Where a verifier's files come from: a local directory, a model hub, or any fsspec URL.

The fingerprint asks for names, small texts and sha256 sums, and never learns which road the bytes came by.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from speculators_core.errors import VerifierError
from speculators_core.verifier.facts import read_config
from speculators_core.verifier.hashes import HashCache, file_key

HUB_ID = re.compile(r"^(?P<id>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?$")


_READ = (".safetensors", ".json", ".jinja", ".model", ".txt")


class VerifierFiles(Protocol):
    """Read-only files of one verifier; VerifierError where it cannot be read or is away."""

    @property
    def where(self) -> str:
        """Directory, URL, or hub id with its commit: for messages."""
        ...

    def names(self) -> frozenset[str]:
        """Paths relative to the verifier, with forward slashes."""
        ...

    def read(self, name: str) -> bytes:
        """Content of a small file."""
        ...

    def read_range(self, name: str, start: int, length: int) -> bytes:
        """`length` bytes of a file from `start`, fewer at its end."""
        ...

    def sha256(self, names: Sequence[str]) -> list[str]:
        """sha256 (hex) of files, in order."""
        ...

    def stamp(self) -> str:
        """Differs from an earlier stamp when any file was written, added or removed since."""
        ...

    def local(self, *, weights: bool) -> Path:
        """A local directory with the verifier's files, fetched where needed; the large ones only with `weights`."""
        ...


def open_verifier(location: str | Path, *, revision: str | None = None, home: Path | None) -> VerifierFiles:
    """The files behind a location: a directory where there is one, else `scheme://…`, else `OWNER/NAME[@REVISION]`.

    Args:
        revision: branch, tag or commit of a hub id; a directory ignores it.
        home: state root, for remembered hashes and fetched files. None: nothing is kept.

    Raises:
        VerifierError: nothing of that kind is there, or it cannot be reached.
    """
    text = str(location)
    if "://" in text:
        from speculators_core.verifier.remote import UrlFiles

        return UrlFiles(text, home=home)
    found = HUB_ID.match(text)
    if found and not Path(text).expanduser().exists():
        from speculators_core.verifier.hub import HubFiles

        return HubFiles(found["id"], found["revision"] or revision, home=home)
    return LocalFiles(Path(text).expanduser(), home=home)


class LocalFiles:
    """A directory; links are followed, as hub snapshots are made of them."""

    def __init__(self, directory: Path, *, home: Path | None) -> None:
        read_config(directory)  # what is no model directory is told apart at once
        self._directory = directory
        self._hashes = HashCache.of_home(home)

    @property
    def where(self) -> str:
        """The directory."""
        return str(self._directory)

    def names(self) -> frozenset[str]:
        """Files of the directory and of its folders."""
        found = (*self._directory.glob("*"), *self._directory.glob("*/*"))
        return frozenset(file.relative_to(self._directory).as_posix() for file in found if file.is_file())

    def read(self, name: str) -> bytes:
        """Content of a file."""
        return self._path(name).read_bytes()

    def read_range(self, name: str, start: int, length: int) -> bytes:
        """Part of a file."""
        with self._path(name).open("rb") as stream:
            stream.seek(start)
            return stream.read(length)

    def sha256(self, names: Sequence[str]) -> list[str]:
        """sha256 of files, a core each; known ones cost a stat call."""
        found = self._hashes.of_all([self._path(name) for name in names])
        self._hashes.save()
        return found

    def stamp(self) -> str:
        """Stat facts of every file of a kind that is read; logs beside them may grow."""
        read = sorted(name for name in self.names() if name.endswith(_READ))
        return ";".join(f"{name}={file_key(self._path(name))}" for name in read)

    def local(self, *, weights: bool) -> Path:
        """The directory itself, absolute."""
        return self._directory.absolute()

    def _path(self, name: str) -> Path:
        path = self._directory / name
        if not path.is_file():
            raise VerifierError(
                f"{path} vanished while {self.where} was read", mend="wait until whoever writes it is done"
            )
        return path
