"""The remote half of the store: artifacts below an fsspec URL (s3://, gs://, memory://, …)."""

from __future__ import annotations

import logging
import shutil
import uuid
from datetime import datetime
from pathlib import Path
from typing import Any

from speculators_core.errors import StoreError
from speculators_core.store.files import VerifiedCache, discard, disk_full, hash_files, storage_errors
from speculators_core.store.manifest import MANIFEST_NAME, Manifest

logger = logging.getLogger(__name__)

_MEND = "check the address, the credentials and the network, then run the same command again; local work is kept"


class Unreachable(StoreError):
    """The store doesn't answer or refuses: no verdict on any artifact."""


class RemoteRoot:
    """One fsspec location. Data lie in `data-<digest>`, so that two publishers never mix their files; the manifest,
    written last by one put, decides which of them is the artifact."""

    def __init__(self, root: str) -> None:
        import fsspec

        if not root.partition("://")[2].strip("/"):  # without its slashes it would pass for a local path
            raise StoreError(
                f"the store's address {root} names no bucket or directory", mend="write s3://BUCKET/PREFIX"
            )
        self.url = root.rstrip("/")
        try:
            self._fs, self._path = fsspec.core.url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise StoreError(
                f"the store's address {root} cannot be used: {error}",
                mend="install the fsspec package of that protocol, or use a local directory",
            ) from error
        self._path = self._path.rstrip("/")

    def read_manifest(self, name: str) -> bytes | None:
        """Content of an artifact's manifest; None where there is none.

        Raises:
            Unreachable: the store doesn't answer.
        """
        self._fs.invalidate_cache()
        try:
            content: bytes = self._fs.cat_file(f"{self._path}/{name}/{MANIFEST_NAME}")
        except FileNotFoundError:
            return None
        except Exception as error:
            raise Unreachable(f"cannot read from {self.url}/{name}: {error}", mend=_MEND) from error
        return content

    def listing(self, name: str, digest: str) -> dict[str, str]:
        """path -> size and version facts of the data files that are there now."""
        prefix = f"{self._path}/{name}/{_data(digest)}"
        self._fs.invalidate_cache()
        try:
            found: dict[str, dict[str, Any]] = self._fs.find(prefix, detail=True)
        except FileNotFoundError:
            return {}
        except Exception as error:
            raise Unreachable(f"cannot list {self.url}/{name}: {error}", mend=_MEND) from error
        return {_relative(path, prefix): _facts(info) for path, info in found.items()}

    def download(self, name: str, manifest: Manifest, target: Path, trash: Path) -> None:
        """Fetch all data files into `target` and verify them; nothing appears there unless every byte is right.

        Raises:
            Unreachable: no answer.
            StoreError: a file is missing, a digest differs, or the local disk is full.
        """
        prefix = f"{self._path}/{name}/{_data(manifest.digest)}"
        partial = trash / f"download-{uuid.uuid4().hex}"
        try:
            with storage_errors(partial, "downloading an artifact"):
                for entry in manifest.files:
                    (partial / entry.path).parent.mkdir(parents=True, exist_ok=True)
                partial.mkdir(parents=True, exist_ok=True)
            try:
                if manifest.files:
                    paths = [entry.path for entry in manifest.files]
                    self._fs.get([f"{prefix}/{path}" for path in paths], [str(partial / path) for path in paths])
            except FileNotFoundError as error:
                raise StoreError(f"{self.url}/{name} lacks a data file: {error}") from error
            except Exception as error:
                full = disk_full(error, partial, "downloading an artifact")
                raise full or Unreachable(f"cannot download {self.url}/{name}: {error}", mend=_MEND) from error
            found = hash_files(partial, [entry.path for entry in manifest.files])
            for entry, actual in zip(manifest.files, found, strict=True):
                if entry != actual:
                    raise StoreError(f"{self.url}/{name}: {entry.path} was changed after it was published")
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.exists():
                discard(target, trash)
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def upload(self, name: str, manifest: Manifest, directory: Path) -> None:
        """Put the data, then the manifest: until that last put the artifact doesn't exist.

        Raises:
            Unreachable: no answer, refused or full; nothing was published.
        """
        base = f"{self._path}/{name}"
        try:
            paths = [entry.path for entry in manifest.files]
            if paths:
                remote = [f"{base}/{_data(manifest.digest)}/{path}" for path in paths]
                self._fs.put([str(directory / path) for path in paths], remote)
            self._fs.pipe_file(f"{base}/{MANIFEST_NAME}", manifest.to_json().encode())
        except Exception as error:
            raise Unreachable(f"cannot publish to {self.url}/{name}: {error}", mend=_MEND) from error
        finally:
            self._fs.invalidate_cache()

    def remove(self, name: str) -> None:
        """Delete an artifact, manifest first."""
        base = f"{self._path}/{name}"
        try:
            self._fs.rm_file(f"{base}/{MANIFEST_NAME}")
            self._fs.rm(base, recursive=True)
        except FileNotFoundError:
            pass
        except Exception as error:
            raise Unreachable(f"cannot remove {self.url}/{name}: {error}", mend=_MEND) from error

    def names(self) -> list[str]:
        """`kind/input_digest` of everything that has a manifest."""
        self._fs.invalidate_cache()
        try:
            found = self._fs.glob(f"{self._path}/*/*/{MANIFEST_NAME}")
        except FileNotFoundError:
            return []
        except Exception as error:
            raise Unreachable(f"cannot list {self.url}: {error}", mend=_MEND) from error
        return sorted("/".join(path.split("/")[-3:-1]) for path in found)

    def modified(self, name: str) -> float | None:
        """When the manifest was written, by the store's clock; None where the store doesn't tell."""
        try:
            info: dict[str, Any] = self._fs.info(f"{self._path}/{name}/{MANIFEST_NAME}")
        except FileNotFoundError:
            return None
        except Exception as error:
            raise Unreachable(f"cannot read from {self.url}/{name}: {error}", mend=_MEND) from error
        found = next((info[key] for key in ("LastModified", "mtime", "created") if info.get(key) is not None), None)
        return found.timestamp() if isinstance(found, datetime) else None if found is None else float(found)

    def fault(self, name: str, manifest: Manifest, cache: VerifiedCache, target: Path, trash: Path) -> str | None:
        """Why the artifact may not be used; None when every byte was verified (now, or before and unchanged since)."""
        listing = self.listing(name, manifest.digest)
        sizes = {path: int(facts.split(":", 1)[0]) for path, facts in listing.items()}
        for entry in manifest.files:
            if entry.path not in sizes:
                return f"{entry.path} is missing"
            if sizes[entry.path] != entry.size:
                return f"{entry.path} has {sizes[entry.path]} bytes instead of {entry.size}"
        if foreign := sorted(set(sizes) - {entry.path for entry in manifest.files}):
            return f"{foreign[0]} doesn't belong there"
        if cache.load(manifest.digest) == listing:
            return None
        try:
            self.download(name, manifest, target, trash)
        except Unreachable:
            raise
        except StoreError as error:
            return error.what
        cache.save(manifest.digest, dict(listing))
        return None


def _data(digest: str) -> str:
    return f"data-{digest[:16]}"


def _relative(path: str, prefix: str) -> str:
    return path.lstrip("/").removeprefix(prefix.lstrip("/")).lstrip("/")


def _facts(info: dict[str, Any]) -> str:
    versions = (info.get(key) for key in ("ETag", "etag", "LastModified", "mtime", "created", "updated"))
    return ":".join(str(fact) for fact in (info["size"], *versions) if fact is not None)
