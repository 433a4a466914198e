"""The artifact store: directories with a manifest, in a local directory or below any fsspec URL.

Local layout:
    <root>/<kind>/<input digest>/manifest.json      written before the directory appears under this name
    <root>/<kind>/<input digest>/data/**            the artifact's files and nothing else
    <root>/.work/<kind>/<input digest>/data/        a stage's workspace; survives a kill; one rename publishes it
    <root>/.locks/                                  flocks for single flight, for publishing, and for use
"""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from speculators_core.errors import StoreError
from speculators_core.store.files import (
    VerifiedCache,
    data_files,
    discard,
    drop_partials,
    file_lock,
    hash_files,
    stamp,
    storage_errors,
    write_atomic,
)
from speculators_core.store.manifest import MANIFEST_NAME, FileEntry, Manifest
from speculators_core.store.remote import RemoteRoot, Unreachable
from speculators_core.store.use import Uses, lock_file, only_holder
from speculators_core.types import ArtifactRef

logger = logging.getLogger(__name__)

_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_-]{0,127}$")


class Store:
    """Content-verified artifacts, found by kind and input digest.

    Args:
        root: a local directory, or any fsspec URL such as s3://bucket/prefix.
        scratch: local directory for what can be lost: verification caches, downloads and, for a remote root,
            workspaces and locks.

    Raises:
        StoreError: the root is a file.
    """

    def __init__(self, root: str | Path, *, scratch: Path) -> None:
        text = str(root).removeprefix("file://")
        self._remote = RemoteRoot(text) if "://" in text else None
        self._scratch = scratch.absolute()
        self._root = self._scratch / "remote" if self._remote else Path(text).expanduser().absolute()
        self._locks = (self._scratch if self._remote else self._root) / ".locks"
        self._uses = Uses(self._locks)
        if self._root.exists() and not self._root.is_dir():
            raise StoreError(
                f"the store {self._root} is not a directory",
                mend="point DRAFTSMITH_STORE at a directory or an fsspec URL",
            )

    @property
    def root(self) -> str:
        """Where the artifacts lie: an absolute path or a URL."""
        return self._remote.url if self._remote else str(self._root)

    def find(self, kind: str, input_digest: str) -> ArtifactRef | None:
        """The artifact of this kind and input digest, every byte verified; None when there is none to use.

        A torn, tampered or vanished artifact is a miss, and the log says why. Files whose stat facts are unchanged
        since they were last hashed are not hashed again.

        Raises:
            StoreError: a remote store doesn't answer.
        """
        name = _name(kind, input_digest)
        manifest, fault = self._examine(name)
        if manifest is None or fault is not None:
            if fault is not None:
                logger.warning("%s is not used: %s; it will be computed again", name, fault)
            return None
        return self._ref(manifest)

    def path(self, ref: ArtifactRef) -> Path:
        """Local directory of the artifact's data files, verified; a remote one is downloaded once by its digest.

        Side effect: while this object lives the artifact counts as in use, and `sweep` leaves it alone.

        Raises:
            StoreError: the artifact vanished, was changed, or cannot be downloaded.
        """
        name = _ref_name(ref)
        self._uses.begin(name)
        manifest, fault = self._examine(name)
        if manifest is not None and fault is None and manifest.digest != ref.digest:
            fault = "it was replaced by another version"
        if manifest is None or fault is not None:
            raise StoreError(
                f"artifact {name} cannot be used: {fault or 'it vanished'}",
                mend="run the command again: the stage that made it is computed anew",
            )
        if self._remote is None:
            return self._root / name / "data"
        target = self._download_path(manifest)
        cache = VerifiedCache(self._scratch / "verified" / f"{name}.local.json")
        if _fault_of(target, manifest, cache) is not None:
            with file_lock(self._lock(name, "download"), f"download of {name}"):
                if _fault_of(target, manifest, cache) is not None:
                    self._remote.download(name, manifest, target, self._trash)
        return target

    def manifest(self, ref: ArtifactRef) -> Manifest:
        """The artifact's manifest.

        Raises:
            StoreError: it vanished, is unreadable, or another version stands in its place.
        """
        name = _ref_name(ref)
        manifest = self._read(name)
        if manifest is None or manifest.digest != ref.digest:
            raise StoreError(
                f"artifact {name} {'vanished' if manifest is None else 'was replaced by another version'}",
                mend="run the command again: the stage that made it is computed anew",
            )
        return manifest

    def workspace(self, kind: str, input_digest: str) -> Path:
        """Local directory in which a stage works; it survives a kill, so that the stage can go on where it was.

        Raises:
            StoreError: the directory cannot be made.
        """
        path = self._work / _name(kind, input_digest) / "data"
        with storage_errors(path, "making a workspace"):
            path.mkdir(parents=True, exist_ok=True)
        return path

    def publish(
        self,
        workspace: Path,
        kind: str,
        input_digest: str,
        meta: Mapping[str, Any] | None = None,
        producer: Mapping[str, str] | None = None,
    ) -> ArtifactRef:
        """Make the workspace an artifact, atomically; the workspace is used up.

        When somebody else published a whole artifact for the same input digest first, theirs stands and ours is
        dropped. A torn or tampered predecessor is replaced.

        Raises:
            StoreError: nothing to publish, links in it, a full disk, an unreachable store. Nothing is half
                published, and the workspace stays for another try.
        """
        name = _name(kind, input_digest)
        with file_lock(self._lock(name, "publish"), f"publication of {name}"):
            if not workspace.is_dir():
                if (published := self.find(kind, input_digest)) is not None:
                    return published
                raise StoreError(f"nothing to publish as {name}: {workspace} is not a directory")
            drop_partials(workspace)
            with storage_errors(workspace, "hashing an artifact"):
                files = hash_files(workspace, data_files(workspace))
            manifest = Manifest(
                kind=kind,
                input_digest=input_digest,
                files=files,
                producer=dict(producer or {}),
                meta=dict(meta or {}),
            )
            existing, fault = self._examine(name)
            if existing is not None and fault is None:
                if existing.digest != manifest.digest:
                    logger.info("%s was published by another run meanwhile; that one is used", name)
                discard(self._own_parent(workspace, name), self._trash)
                return self._ref(existing)
            if self._remote is not None:
                self._publish_remote(workspace, name, manifest)
            else:
                self._publish_local(workspace, name, manifest)
            return self._ref(manifest)

    def single_flight(
        self, kind: str, input_digest: str, *, shared: bool = False, look: Callable[[], None] | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Only one process (or thread) of this machine computes an artifact at a time; the others wait.

        The lock is an flock: it dies with its holder. Look with `find` again once inside. Not reentrant.

        Args:
            shared: for who makes a part of it: beside the makers of other parts, and apart from who makes the whole.
            look: called now and then while it waits; what it raises ends the wait.
        """
        name = _name(kind, input_digest)
        told = f"{kind} {input_digest[:12]} is being computed"
        return file_lock(self._lock(name, "flight"), told, shared=shared, look=look)

    def artifacts(self, kind: str | None = None, *, whole: bool = False) -> Iterator[ArtifactRef]:
        """All artifacts that have a readable manifest, by name; not verified.

        Args:
            whole: whether one that cannot be read is an error, rather than left out and logged: for whoever concludes
                something from what is not there.

        Raises:
            StoreError: the store doesn't answer; with `whole`, a manifest cannot be read.
        """
        if self._remote is not None:
            names = self._remote.names()
        else:
            found = self._root.glob(f"[!.]*/*/{MANIFEST_NAME}")
            names = sorted(path.parent.relative_to(self._root).as_posix() for path in found)
        for name in names:
            if kind is not None and name.split("/")[0] != kind:
                continue
            try:
                manifest = self._read(name)
            except Unreachable:
                raise
            except StoreError as error:
                if whole:
                    raise StoreError(
                        f"{name} cannot be read, and what it was made of is not known: {error.what}",
                        mend=f"use the version of draftsmith that wrote it, or delete {self.root}/{name}: the stage "
                        "that made it is then computed anew",
                    ) from error
                logger.warning("%s is skipped: %s", name, error.what)
                continue
            if manifest is not None:
                yield self._ref(manifest)

    def remove(self, ref: ArtifactRef) -> None:
        """Delete an artifact; removing what is gone already is fine."""
        name = _ref_name(ref)
        with file_lock(self._lock(name, "publish"), f"removal of {name}", even_full=True):
            if self._remote is not None:
                self._remote.remove(name)
            else:
                discard(self._root / name, self._trash)

    def sweep(self, ref: ArtifactRef) -> bool:
        """Delete an artifact that nobody uses or makes at this moment.

        Returns: False where somebody does, or where another version stands in its place: that stays.
        """
        name = _ref_name(ref)
        with only_holder(*(self._lock(name, purpose) for purpose in ("use", "flight"))) as free:
            found = self._read(name) if free else None
            if found is None or found.digest != ref.digest:
                return False
            self.remove(ref)
            if self._remote is not None:
                discard(self._scratch / "downloads" / ref.kind / ref.digest, self._trash)
        return True

    def busy(self, kind: str, input_digest: str) -> bool:
        """Whether somebody uses or makes this artifact at this moment."""
        name = _name(kind, input_digest)
        with only_holder(*(self._lock(name, purpose) for purpose in ("use", "flight")), create=False) as free:
            return not free

    def last_used(self, ref: ArtifactRef) -> float:
        """When the artifact was last used here, or else published, in seconds since 1970 by this machine's clock."""
        name = _ref_name(ref)
        times = [_mtime(self._lock(name, "use"))]
        times.append(self._remote.modified(name) if self._remote else _mtime(self._root / name / MANIFEST_NAME))
        known = [moment for moment in times if moment is not None]
        return max(known) if known else time.time()  # a store that tells no times: as if just used

    def workspaces(self) -> Iterator[tuple[str, str, Path]]:
        """(kind, input digest, directory) of unfinished work: of running stages, and what killed ones left."""
        for path in sorted(self._work.glob("[!.]*/*")):
            if path.is_dir():
                yield path.parent.name, path.name, path

    def sweep_workspace(self, kind: str, input_digest: str) -> bool:
        """Delete unfinished work that no running stage holds; False, and it stays, where one does."""
        name = _name(kind, input_digest)
        with only_holder(self._lock(name, "flight")) as free:
            if free:
                discard(self._work / name, self._trash)
        return free

    def empty_trash(self, *, older_than_s: float = 86_400) -> None:
        """Delete what a killed deletion left; downloads that may still run are left for `older_than_s`."""
        for grave in self._trash.glob("*"):
            age = time.time() - (_mtime(grave) or 0.0)
            if not grave.name.startswith("download-") or age > older_than_s:
                shutil.rmtree(grave, ignore_errors=True)

    # -- inner workings ---------------------------------------------------------------------------------------------

    @property
    def _work(self) -> Path:
        # Beside the artifacts for a local store: publishing must be a rename within one file system.
        return (self._scratch if self._remote else self._root) / ".work"

    @property
    def _trash(self) -> Path:
        return self._work / ".trash"

    def _lock(self, name: str, purpose: str) -> Path:
        return lock_file(self._locks, name, purpose)

    def _cache(self, name: str) -> VerifiedCache:
        return VerifiedCache(self._scratch / "verified" / f"{name}.json")

    def _download_path(self, manifest: Manifest) -> Path:
        return self._scratch / "downloads" / manifest.kind / manifest.digest

    def _ref(self, manifest: Manifest) -> ArtifactRef:
        name = f"{manifest.kind}/{manifest.input_digest}"
        return ArtifactRef(kind=manifest.kind, uri=f"{self.root}/{name}", digest=manifest.digest)

    def _read(self, name: str) -> Manifest | None:
        where = f"{self.root}/{name}/{MANIFEST_NAME}"
        if self._remote is not None:
            content = self._remote.read_manifest(name)
        else:
            try:
                content = Path(where).read_bytes()
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                content = None
            except OSError as error:
                raise Unreachable(
                    f"{where} cannot be read: {error.strerror or error}",
                    mend="check the disk and the permissions, then run the same command again",
                ) from error
        if content is None:
            return None
        manifest = Manifest.parse(content, where)
        if f"{manifest.kind}/{manifest.input_digest}" != name:
            raise StoreError(f"{where} belongs to {manifest.kind}/{manifest.input_digest}")
        return manifest

    def _examine(self, name: str) -> tuple[Manifest | None, str | None]:
        """(manifest, None) for a usable artifact, (…, reason) for an unusable one, (None, None) for none at all."""
        try:
            manifest = self._read(name)
        except Unreachable:
            raise  # no answer is no verdict: nothing is computed again for it
        except StoreError as error:
            return None, error.what
        if manifest is None:
            torn = self._remote is None and (self._root / name).exists()
            return None, "it has no manifest (a write was cut off)" if torn else None
        cache = self._cache(name)
        if self._remote is not None:
            return manifest, self._remote.fault(name, manifest, cache, self._download_path(manifest), self._trash)
        return manifest, _fault_of(self._root / name / "data", manifest, cache)

    def _own_parent(self, workspace: Path, name: str) -> Path:
        own = self._work / name
        return own if workspace.absolute() == own / "data" else workspace

    def _publish_local(self, workspace: Path, name: str, manifest: Manifest) -> None:
        target, staging = self._root / name, self._work / name
        with storage_errors(target, "publishing an artifact"):
            target.parent.mkdir(parents=True, exist_ok=True)
            if workspace.absolute() != staging / "data":
                staging = self._work / ".foreign" / name
                discard(staging, self._trash)
                staging.mkdir(parents=True)
                # A copy: a foreign directory may lie on another file system, and a failure must leave it whole.
                shutil.copytree(workspace, staging / "data")
            drop_partials(staging)  # they may lie beside the data, too
            write_atomic(staging / MANIFEST_NAME, lambda partial: partial.write_text(manifest.to_json()))
            if target.exists():
                discard(target, self._trash)
            staging.rename(target)
        if workspace.exists():
            shutil.rmtree(workspace, ignore_errors=True)
        fault = _fault_of(target / "data", manifest, self._cache(name), trust_contents=staging == self._work / name)
        if fault is not None:
            raise StoreError(
                f"{name} changed while it was being published: {fault}",
                mend="make sure that nothing else writes into the workspace, and run again",
            )

    def _publish_remote(self, workspace: Path, name: str, manifest: Manifest) -> None:
        assert self._remote is not None
        self._remote.upload(name, manifest, workspace)
        self._cache(name).save(manifest.digest, dict(self._remote.listing(name, manifest.digest)))
        target = self._download_path(manifest)
        with storage_errors(target, "keeping a local copy"):
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                with contextlib.suppress(OSError):  # another file system: it will be downloaded when it is needed
                    workspace.rename(target)
        discard(self._own_parent(workspace, name), self._trash)


def _fault_of(data: Path, manifest: Manifest, cache: VerifiedCache, *, trust_contents: bool = False) -> str | None:
    """Why the local files differ from the manifest; None when they don't. Hashes only what changed since last time."""
    try:
        present = data_files(data)
    except StoreError as error:
        return error.what
    expected = {entry.path: entry for entry in manifest.files}
    for path in expected.keys() - set(present):
        return f"{path} is missing"
    for path in set(present) - expected.keys():
        return f"{path} doesn't belong there"
    known = cache.load(manifest.digest)
    stamps: dict[str, list[int] | str] = {path: list(stamp(data / path)) for path in present}
    for path, entry in expected.items():
        size = stamps[path][0]
        if size != entry.size:
            return f"{path} has {size} bytes instead of {entry.size}"
    unknown = [] if trust_contents else [path for path in present if known.get(path) != stamps[path]]
    actual: tuple[FileEntry, ...] = hash_files(data, unknown)
    for found in actual:
        if found.sha256 != expected[found.path].sha256:
            return f"{found.path} was changed after it was published (sha256 differs)"
    if known != stamps:
        cache.save(manifest.digest, stamps)
    return None


def _mtime(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return None


def _name(kind: str, input_digest: str) -> str:
    for part in (kind, input_digest):
        if not _NAME.match(part):
            raise StoreError(f"{part!r} cannot name an artifact", mend="use letters, digits, '-' and '_'")
    return f"{kind}/{input_digest}"


def _ref_name(ref: ArtifactRef) -> str:
    # The last two parts of the address: a store that was moved still opens its artifacts.
    kind, digest = ref.uri.rstrip("/").split("/")[-2:]
    return _name(kind, digest)
