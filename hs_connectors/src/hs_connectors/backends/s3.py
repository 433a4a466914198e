"""Records as objects of any S3 server, through s3fs (the extra `s3`).

Configuration: `root` (s3://BUCKET/PREFIX), `endpoint_url` (default: AWS's own, or AWS_ENDPOINT_URL), `part_mib` (size
of the parts that large payloads travel in, several at once; default 16), `attempts` (tries of each request, with
growing pauses; default 5). Credentials come from where every AWS client looks (AWS_ACCESS_KEY_ID, ~/.aws, …): what
stands here can be read in the server's command line.
    <key>.safetensors    the payload         <key>.record.json    its manifest, written last: {"bytes": n}
    engine.json          what the engine is                       or, in place of a record, {"error": text}
A payload without a manifest does not exist. Keys are written once: whoever writes one again while it is read may make
its reader see a wrong checksum. What else lies under the prefix, or below it, is other people's and stays.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any, ClassVar, TypeVar

import aiohttp
import s3fs
from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

from hs_connectors.backends._ownership import OWN_PLACE, error_of, kind_of, refuse_foreign
from hs_connectors.backends._waiting import await_payload
from hs_connectors.contract import Entry, Payload, check_key, is_key
from hs_connectors.errors import CaptureFailed, EntryError, SettingsError, StorageError

log = logging.getLogger(__name__)
T = TypeVar("T")
_DATA, _MANIFEST, _ENGINE = ".safetensors", ".record.json", "engine.json"
_OPTIONS = {"root", "endpoint_url", "part_mib", "attempts"}
_PAUSES_S = (0.04, 0.25)
"""A record is usually there some 20 ms after its handle, and each look in vain costs both sides a request."""
_REMEMBERED = 4096
_ABANDONED_S = 86400.0
"""Older payloads without a manifest, and older unfinished uploads, belong to nobody that lives: of an upload only the
name is known, and somebody's large model may take hours."""
_PROBE = re.compile(r"\.[0-9a-f]{16}\.probe")
"""What a writer that was killed in its first second leaves."""
_CONNECT_S, _READ_S = 5, 60


class S3Backend:
    """Publishes by put (in parts where it is large), then by a put of the manifest."""

    name: ClassVar[str] = "s3"

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._root = str(config.get("root", "")).rstrip("/")
        if set(config) - _OPTIONS or not self._root.startswith("s3://") or not self._root.removeprefix("s3://"):
            raise SettingsError(
                f"the s3 backend takes root (s3://BUCKET/PREFIX), endpoint_url, part_mib and attempts, got "
                f"{sorted(config)} with root {self._root!r}",
                mend="credentials come from the environment: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
            )
        self._part_bytes = int(config.get("part_mib", 16)) << 20
        attempts = int(config.get("attempts", 5))
        if self._part_bytes < 5 << 20 or attempts < 1:
            raise SettingsError("part_mib is at least 5 and attempts at least 1")
        self._fs = s3fs.S3FileSystem(
            endpoint_url=config.get("endpoint_url"),
            use_listings_cache=False,
            config_kwargs={
                "retries": {"total_max_attempts": attempts, "mode": "standard"},
                "connect_timeout": _CONNECT_S,
                "read_timeout": _READ_S,
                "request_checksum_calculation": "when_required",  # records carry their own
                "response_checksum_validation": "when_required",
            },
        )
        self._fs.retries = attempts
        self._read_here: dict[str, None] = {}  # keys of records that were read whole, the newest last

    def prepare(self) -> None:
        """Prove that the prefix can be written; remove what killed writers left more than a day ago.

        A killed writer's payload appears whole, or (some servers) as an object of no bytes; anything else stays.
        """
        probe = self._path(f".{secrets.token_hex(8)}.probe")
        self._ask("cannot be written", lambda: self._fs.pipe_file(probe, b"x"))
        self._ask("cannot be written", lambda: self._fs.rm_file(probe))
        abandoned = time.time() - _ABANDONED_S
        manifests, payloads, probes = self._list()
        old = [key for key in payloads.keys() - manifests.keys() if payloads[key][1] < abandoned]
        orphans = [key for key in old if not payloads[key][0] or kind_of(partial(self._head, key + _DATA)) == "record"]
        for key in orphans:
            self._remove(key + _DATA)
        for name, since in probes.items():
            if since < abandoned:
                self._remove(name)
        uploads = self._abort_uploads(abandoned)
        if orphans or uploads:
            log.info("removed leftovers of killed writers payloads=%d uploads=%d", len(orphans), uploads)

    def publish(self, key: str, *pieces: Payload) -> None:
        """Put the payload, then its manifest."""
        body = b"".join(pieces)
        what = f"refused record {check_key(key)} of {len(body)} bytes"
        self._ask(what, lambda: self._fs.pipe_file(self._path(key + _DATA), body, chunksize=self._part_bytes))
        self._put_manifest(key, {"bytes": len(body)}, what)

    def fail(self, key: str, message: str) -> None:
        """Publish a manifest that says why there is no record."""
        self._put_manifest(check_key(key), {"error": message}, f"refused even the error marker of {key}")

    def fetch(self, key: str, timeout_s: float) -> Payload:
        """Poll for the manifest, from every 40 ms to every 250; then read the payload, a large one in parallel."""
        path = self._path(check_key(key))

        def look() -> Payload | None:
            num_bytes = self._manifest(key)
            if isinstance(num_bytes, str):
                raise CaptureFailed(f"record {key} in {self._root}: {num_bytes}")
            if num_bytes is None:
                return None
            return self._ask(f"refused to read record {key}", lambda: self._get(path + _DATA, num_bytes))

        payload = await_payload(look, timeout_s, _PAUSES_S, f"record {key} of {self._root}")
        if kind_of(lambda num_bytes: bytes(memoryview(payload)[:num_bytes])) == "record":
            self._remember(key)
        return payload

    def discard(self, key: str) -> None:
        """Remove the manifest, then the payload; EntryError for anything else that bears the name of one.

        What this reader has read is known to be a record: it isn't asked for again.
        """
        if check_key(key) in self._read_here:
            self._read_here.pop(key, None)
        else:
            self._manifest(key)
            refuse_foreign(self._path(key + _DATA), partial(self._head, key + _DATA))
        self._remove(key + _MANIFEST)
        self._remove(key + _DATA)

    def entries(self) -> Iterator[Entry]:
        """From one listing; times are those of the manifests."""
        manifests, payloads, _ = self._list()
        for key, (_, modified_at) in manifests.items():
            if key in payloads:
                yield Entry(key, "record", payloads[key][0], modified_at)
            else:
                yield Entry(key, "error", 0, modified_at)

    def announce(self, facts: Mapping[str, Any]) -> None:
        """Put `engine.json`."""
        content = json.dumps(facts, indent=2, sort_keys=True).encode()
        self._ask(f"refused {_ENGINE}", lambda: self._fs.pipe_file(self._path(_ENGINE), content))

    def announcement(self) -> dict[str, Any] | None:
        """Read `engine.json`."""
        content = self._read(_ENGINE)
        return None if content is None else self._json(content, _ENGINE)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _remember(self, key: str) -> None:
        self._read_here[key] = None
        for oldest in list(self._read_here)[:-_REMEMBERED]:
            self._read_here.pop(oldest, None)

    def _manifest(self, key: str) -> int | str | None:
        """A record's bytes, or why there is none; None without a manifest, EntryError where it is not ours."""
        name = key + _MANIFEST
        content = self._read(name)
        if content is None:
            return None
        if (text := error_of(content)) is not None:
            return text
        facts = self._json(content, name)
        num_bytes = facts.get("bytes")
        if set(facts) != {"bytes"} or not isinstance(num_bytes, int) or num_bytes < 0:
            raise EntryError(f"{self._path(name)} is no manifest of ours: it is not deleted", mend=OWN_PLACE)
        return num_bytes

    def _put_manifest(self, key: str, facts: Mapping[str, Any], what: str) -> None:
        content = json.dumps(facts).encode()
        self._ask(what, lambda: self._fs.pipe_file(self._path(key + _MANIFEST), content))

    def _get(self, path: str, num_bytes: int) -> Payload | None:
        starts = range(0, num_bytes, self._part_bytes)[: max(1, num_bytes // self._part_bytes)]
        ends = [*starts[1:], num_bytes] if starts else []  # the last part takes the rest: no request for a few bytes
        try:
            parts = self._fs.cat_ranges([path] * len(ends), list(starts), ends, max_gap=None, on_error="raise")
        except FileNotFoundError:
            return None  # deleted meanwhile
        except OSError as error:
            if _is_empty(error):
                return b""  # cut: no record, and its reader will say so
            raise
        return bytearray().join(parts)

    def _read(self, name: str, num_bytes: int = 1 << 20) -> bytes | None:
        def read() -> bytes | None:
            try:  # a range, so that no size is asked for
                content: bytes = self._fs.cat_file(self._path(name), start=0, end=num_bytes)
            except FileNotFoundError:
                return None
            except OSError as error:
                if _is_empty(error):
                    return b""
                raise
            return content

        return self._ask(f"refused to read {name}", read)

    def _head(self, name: str, num_bytes: int) -> bytes:
        return self._read(name, num_bytes) or b""

    def _json(self, content: bytes, name: str) -> dict[str, Any]:
        try:
            return dict(json.loads(content))
        except (ValueError, TypeError, RecursionError) as error:
            raise EntryError(f"{self._path(name)} is not a JSON object: {error}", mend=OWN_PLACE) from error

    def _remove(self, name: str) -> None:
        def remove() -> None:
            with suppress(FileNotFoundError):
                self._fs.rm_file(self._path(name))

        self._ask(f"refused to delete {name}", remove)

    def _list(self) -> tuple[dict[str, tuple[int, float]], dict[str, tuple[int, float]], dict[str, float]]:
        """(manifests, payloads) by key: size and time; probes' names: time. What lies in directories below is none."""
        found: dict[str, Any] = self._ask("cannot be listed", lambda: self._fs.find(self._root, detail=True)) or {}
        manifests: dict[str, tuple[int, float]] = {}
        payloads: dict[str, tuple[int, float]] = {}
        probes: dict[str, float] = {}
        prefix = f"{self._root.removeprefix('s3://')}/"
        for path, info in found.items():
            for suffix, target in ((_MANIFEST, manifests), (_DATA, payloads)):
                if (key := _key_of(path, prefix, suffix)) is not None:
                    target[key] = (int(info["size"]), info["LastModified"].timestamp())
            if _PROBE.fullmatch(name := path.removeprefix(prefix)):
                probes[name] = info["LastModified"].timestamp()
        return manifests, payloads, probes

    def _abort_uploads(self, before: float) -> int:
        bucket, directory, _ = self._fs.split_path(self._root)
        prefix = f"{directory}/" if directory else ""
        found = self._ask(
            "cannot list its unfinished uploads",
            lambda: self._fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix),
        )
        abandoned = [
            upload
            for upload in found.get("Uploads", [])
            if upload["Initiated"] < datetime.fromtimestamp(before, UTC)
            and _key_of(upload["Key"], prefix, _DATA) is not None
        ]
        for upload in abandoned:
            names = {"Bucket": bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
            abort = partial(self._fs.call_s3, "abort_multipart_upload", **names)
            self._ask("refused to abort an unfinished upload", abort)
        return len(abandoned)

    def _ask(self, what: str, request: Callable[[], T]) -> T:
        """The answer to a request; StorageError where the server refuses it, or does not answer after all attempts."""
        try:
            return request()
        except (OSError, BotoCoreError, ClientError, ResponseParserError, aiohttp.ClientError) as error:
            raise StorageError(
                f"the store {self._root} {what}: {error or type(error).__name__}",
                mend="check bucket, credentials and endpoint_url; does the server answer, and has it room?",
            ) from error


def _key_of(name: str, prefix: str, suffix: str) -> str | None:
    """The key of that object of ours; None where it is none, or lies in a directory below."""
    key = name.removeprefix(prefix).removesuffix(suffix)
    return key if name == f"{prefix}{key}{suffix}" and is_key(key) else None


def _is_empty(error: OSError) -> bool:
    """Whether a range was refused because the object has no byte there."""
    answer: Mapping[str, Any] = getattr(error.__cause__, "response", {})
    return answer.get("Error", {}).get("Code") in ("InvalidRange", "416")
