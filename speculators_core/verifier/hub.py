"""A verifier on a model hub, at one commit. Weights are told by the hub's own sha256 sums: no byte of them is fetched.

HF_ENDPOINT and HF_HOME are huggingface_hub's; a listing of a commit never changes, so it is asked for once.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from pydantic import Field, ValidationError

from speculators_core.errors import VerifierError
from speculators_core.store.files import remember_text
from speculators_core.types import StrictModel
from speculators_core.verifier.hashes import HashCache
from speculators_core.verifier.remote import is_large

log = logging.getLogger(__name__)

_COMMIT = re.compile(r"^[0-9a-f]{40}$")


class Listing(StrictModel):
    """A commit's files."""

    id: str = Field(description="OWNER/NAME")
    commit: str = Field(description="40 hexadecimal digits")
    sha256: dict[str, str | None] = Field(description="file -> sha256 where the hub states it (LFS), else null")


class HubFiles:
    """The files of one commit of `OWNER/NAME`; a branch or tag is resolved once, at construction."""

    def __init__(self, repo: str, revision: str | None, *, home: Path | None) -> None:
        self._home = home
        self._hashes = HashCache.of_home(home)
        self._endpoint = os.environ.get("HF_ENDPOINT") or None
        self._listing = self._kept(repo, revision) or self._ask(repo, revision)
        if "config.json" not in self._listing.sha256:
            raise VerifierError(f"{self.where} is not a verifier: it has no config.json", mend="name a model's id")

    @property
    def commit(self) -> str:
        """What the revision named when it was looked up."""
        return self._listing.commit

    @property
    def where(self) -> str:
        """OWNER/NAME@commit."""
        return f"{self._listing.id}@{self._listing.commit}"

    def names(self) -> frozenset[str]:
        """Files of the commit."""
        return frozenset(self._listing.sha256)

    def read(self, name: str) -> bytes:
        """Content of a file, kept in the hub's own cache."""
        return self._fetch(name).read_bytes()

    def read_range(self, name: str, start: int, length: int) -> bytes:
        """Part of a file; the whole is fetched when the hub's cache lacks it."""
        import httpx
        from huggingface_hub import get_token, hf_hub_url, try_to_load_from_cache

        cached = try_to_load_from_cache(self._listing.id, name, revision=self.commit)
        if isinstance(cached, str):
            with Path(cached).open("rb") as stream:
                stream.seek(start)
                return stream.read(length)
        url = hf_hub_url(self._listing.id, name, revision=self.commit, endpoint=self._endpoint)
        headers = {"Range": f"bytes={start}-{start + length - 1}"}
        if token := get_token():
            headers["Authorization"] = f"Bearer {token}"
        try:
            answer = httpx.get(url, headers=headers, follow_redirects=True, timeout=30)
            answer.raise_for_status()
        except httpx.HTTPError as error:
            raise VerifierError(f"{name} of {self.where} cannot be read: {error}", mend=_MEND) from error
        return answer.content if answer.status_code == 206 else answer.content[start : start + length]

    def sha256(self, names: Sequence[str]) -> list[str]:
        """The hub's own sums; only files that it does not store as LFS are fetched and hashed."""
        found = [self._listing.sha256[name] or self._hashes.of(self._fetch(name)) for name in names]
        self._hashes.save()
        return found

    def stamp(self) -> str:
        """The commit: its files never change."""
        return self.where

    def local(self, *, weights: bool) -> Path:
        """The snapshot in the hub's cache."""
        from huggingface_hub import snapshot_download

        skipped = [name for name in self._listing.sha256 if is_large(name)]
        ignored = [name for name in skipped if not (weights and name.endswith(".safetensors"))]
        with self._answers("fetching its files"):
            return Path(
                snapshot_download(
                    self._listing.id, revision=self.commit, ignore_patterns=ignored, endpoint=self._endpoint
                )
            )

    def _fetch(self, name: str) -> Path:
        from huggingface_hub import hf_hub_download

        with self._answers(f"fetching {name}"):
            return Path(hf_hub_download(self._listing.id, name, revision=self.commit, endpoint=self._endpoint))

    def _kept(self, repo: str, revision: str | None) -> Listing | None:
        path = self._keep_at(repo, revision or "")
        if path is None or not path.is_file():
            return None
        try:
            return Listing.model_validate_json(path.read_text(encoding="utf-8"))
        except ValidationError:
            log.info("the kept listing %s is of another form; asking again", path)
            return None

    def _keep_at(self, repo: str, commit: str) -> Path | None:
        if self._home is None or not _COMMIT.match(commit):
            return None  # a branch moves: nothing is kept under its name
        return self._home / "hub" / repo.replace("/", "--") / f"{commit}.json"

    def _ask(self, repo: str, revision: str | None) -> Listing:
        from huggingface_hub import HfApi

        self._listing = Listing(id=repo, commit=revision or "main", sha256={})  # what messages call it until we know
        with self._answers("looking it up"):
            info = HfApi(endpoint=self._endpoint).model_info(repo, revision=revision, files_metadata=True, timeout=20)
        if info.sha is None:
            raise VerifierError(f"the hub states no commit for {self.where}", mend=_MEND)
        files = {file.rfilename: file.lfs.sha256 if file.lfs else None for file in info.siblings or []}
        found = Listing(id=repo, commit=info.sha, sha256=files)
        if path := self._keep_at(repo, info.sha):
            remember_text(path, found.model_dump_json(indent=1))
        return found

    @contextmanager
    def _answers(self, doing: str) -> Iterator[None]:
        """Turn the hub's and the network's errors into a VerifierError."""
        from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

        # the base of its errors, of whichever HTTP library it is built on
        transport = cast(type[Exception], HfHubHTTPError.__mro__[1])
        try:
            yield
        except RepositoryNotFoundError as error:
            raise VerifierError(
                f"{self._listing.id} is neither a directory here nor a model on the hub",
                mend="check the path or the id; for a private model, log in with `hf auth login`",
            ) from error
        except RevisionNotFoundError as error:
            raise VerifierError(f"the hub has no revision {self.where}", mend="check the revision") from error
        except (transport, OSError, json.JSONDecodeError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise VerifierError(f"the hub failed at {doing} ({self.where}): {reason}", mend=_MEND) from error


_MEND = "check the network and HF_ENDPOINT, or name a local directory; then run the same command again"
