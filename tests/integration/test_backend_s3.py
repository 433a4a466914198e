"""What is special about S3: uploads in parts, manifests written last, servers and buckets that are not there."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import aiohttp
import pytest
import s3fs
import torch
from botocore.parsers import ResponseParserError
from safetensors.torch import save

from hs_connectors import Handle, open_backend, open_reader, open_writer
from hs_connectors.backends import s3
from hs_connectors.errors import CaptureFailed, RecordTimeout, SettingsError, StorageError
from hs_connectors.record import pack
from hs_connectors.testing import assert_same, make_record
from tests.services import CREDENTIALS, S3Server, free_port


@pytest.fixture
def root(s3_environment: S3Server) -> str:
    return f"s3://{s3_environment.bucket}/{secrets.token_hex(8)}"


@pytest.fixture
def files(s3_environment: S3Server) -> s3fs.S3FileSystem:
    return s3fs.S3FileSystem(use_listings_cache=False)


@pytest.fixture
def all_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "_ABANDONED_S", -60.0)


def test_a_large_record_travels_in_parts(root: str, files: s3fs.S3FileSystem) -> None:
    record = make_record(500_000)  # 19 MB: four parts of 5 MiB
    handle = open_writer("s3", {"root": root, "part_mib": 5}).put("key", record)
    assert "-" in files.info(f"{root}/key.safetensors")["ETag"], "it was not a multipart upload"
    assert_same(open_reader("s3", {"root": root, "part_mib": 5}).get(handle, 5), record)
    assert_same(open_reader("s3", {"root": root, "part_mib": 64}).get(handle, 5), record)


def test_a_payload_without_its_manifest_does_not_exist(
    root: str, files: s3fs.S3FileSystem, all_is_abandoned: None
) -> None:
    backend = open_backend("s3", {"root": root})
    backend.prepare()
    open_writer("s3", {"root": root}).put("whole", make_record())
    files.pipe_file(f"{root}/half.safetensors", bytes(pack(make_record())))  # killed before it wrote the manifest
    files.pipe_file(f"{root}/none.safetensors", b"")  # killed before a byte came: SeaweedFS keeps the name
    files.pipe_file(f"{root}/.0123456789abcdef.probe", b"x")  # killed while it tried whether it may write
    with pytest.raises(RecordTimeout):
        backend.fetch("half", 0)
    assert [entry.key for entry in backend.entries()] == ["whole"]
    backend.prepare()
    assert sorted(path.rpartition("/")[2] for path in files.find(root)) == ["whole.record.json", "whole.safetensors"]


def test_what_was_read_is_deleted_without_a_look(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = open_backend("s3", {"root": root})
    backend.prepare()
    for key in ("read", "unread", "weights"):
        backend.publish(key, pack(make_record()) if key != "weights" else save({"w": torch.zeros(3)}))
    backend.fetch("read", 5)
    backend.fetch("weights", 5)
    asked: list[str] = []
    ask = backend._fs._call_s3  # type: ignore[attr-defined]

    def count(method: str, *args: object, **kwargs: object) -> object:
        asked.append(method)
        return ask(method, *args, **kwargs)

    monkeypatch.setattr(backend._fs, "_call_s3", count)  # type: ignore[attr-defined]
    backend.discard("read")
    assert asked == ["delete_object"] * 2
    backend.discard("unread")
    assert asked[2:] == ["get_object", "get_object", "delete_object", "delete_object"]
    with pytest.raises(StorageError, match="it is not deleted"):
        backend.discard("weights")
    assert [entry.key for entry in backend.entries()] == ["weights"]


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"schema": "draftsmith.states/1"}])
def test_what_other_people_keep_there_is_never_deleted(
    root: str, files: s3fs.S3FileSystem, all_is_abandoned: None, metadata: dict[str, str] | None
) -> None:
    many = {f"layer.{number}.weight": torch.ones(2) for number in range(200)}  # a header of more than the first look
    others = {
        "model.safetensors": save(many, metadata=metadata),
        "torn.safetensors": b"no safetensors at all",
        "below/row.safetensors": bytes(pack(make_record())),
    }
    for name, content in others.items():
        files.pipe_file(f"{root}/{name}", content)
    backend = open_backend("s3", {"root": root})
    backend.prepare()
    with pytest.raises(StorageError, match="holds tensors, but no record"):
        backend.discard("model")
    files.pipe_file(f"{root}/empty.safetensors", b"")
    backend.fail("empty", "a marker beside it")
    assert [(entry.key, entry.kind) for entry in backend.entries()] == [("empty", "record")]
    backend.discard("empty")
    assert {path.removeprefix(root.removeprefix("s3://") + "/") for path in files.find(root)} == {
        "model.safetensors",
        "torn.safetensors",
        "below/row.safetensors",
    }


def test_an_upload_that_was_never_finished_is_aborted(
    root: str, files: s3fs.S3FileSystem, s3_environment: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = root.removeprefix(f"s3://{s3_environment.bucket}/")

    def start(key: str) -> str:
        started: dict[str, str] = files.call_s3("create_multipart_upload", Bucket=s3_environment.bucket, Key=key)
        return started["UploadId"]

    ours = start(f"{prefix}/key.safetensors")
    others = {start(prefix + name) for name in ("-v2/key.safetensors", "/below/key.safetensors", "/big.bin")}

    def uploads() -> set[str]:
        found = files.call_s3("list_multipart_uploads", Bucket=s3_environment.bucket, Prefix=prefix)
        return {upload["UploadId"] for upload in found.get("Uploads", [])}

    open_backend("s3", {"root": root}).prepare()
    assert uploads() == {ours, *others}, "it may belong to a writer that lives"
    monkeypatch.setattr(s3, "_ABANDONED_S", -60.0)
    open_backend("s3", {"root": root}).prepare()
    assert uploads() == others


def test_a_marker_replaces_the_record(root: str) -> None:
    backend = open_backend("s3", {"root": root})
    backend.fail("key", "the bucket is full")
    with pytest.raises(CaptureFailed, match="the bucket is full"):
        backend.fetch("key", 0)


def test_a_bucket_that_is_not_there_is_refused_before_the_first_record(s3_environment: S3Server) -> None:
    with pytest.raises(StorageError, match=r"nosuchbucket[\s\S]*mend: check bucket"):
        open_writer("s3", {"root": "s3://nosuchbucket/records"})


@pytest.fixture
def nobody_there() -> Iterator[str]:
    yield f"http://127.0.0.1:{free_port()}"


def test_a_server_that_is_away_is_an_error_after_all_attempts(s3_environment: S3Server, nobody_there: str) -> None:
    backend = open_backend("s3", {"root": "s3://artifacts/x", "endpoint_url": nobody_there, "attempts": 2})
    started = time.monotonic()
    for call in (
        lambda: backend.publish("key", b"x"),
        lambda: backend.fail("key", "x"),
        lambda: backend.fetch("key", 60),
        lambda: list(backend.entries()),
    ):
        with pytest.raises(StorageError, match="does the server answer"):
            call()
    assert time.monotonic() - started < 60


@pytest.fixture
def garbling(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server that breaks off in the middle of its answers."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"half")

        def log_message(self, format: str, *args: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_answers_that_nobody_can_parse_are_errors_of_the_store(garbling: str) -> None:
    backend = open_backend("s3", {"root": "s3://artifacts/x", "endpoint_url": garbling, "attempts": 1})
    with pytest.raises(StorageError, match="does the server answer") as caught:
        backend.fetch("key", 0)
    assert isinstance(caught.value.__cause__, aiohttp.ClientPayloadError)

    def fail() -> None:
        raise ResponseParserError("unable to parse response, invalid XML received")

    with pytest.raises(StorageError, match="invalid XML"):
        backend._ask("refused", fail)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"root": "/records"},
        {"root": "s3://"},
        {"root": "s3://b/x", "secret": "hush"},
        {"root": "s3://b", "part_mib": 1},
    ],
)
def test_settings_are_checked_and_secrets_are_neither_taken_nor_shown(config: dict[str, str]) -> None:
    with pytest.raises(SettingsError) as caught:
        open_backend("s3", config)
    assert "hush" not in str(caught.value)


def test_a_manifest_that_is_none_is_an_error(root: str, files: s3fs.S3FileSystem) -> None:
    backend = open_backend("s3", {"root": root})
    for content in (b"[]", b"{}", b'{"bytes": -1}', b"not JSON"):
        files.pipe_file(f"{root}/key.record.json", content)
        with pytest.raises(StorageError, match=r"key\.record\.json is"):
            backend.fetch("key", 0)


def test_a_reader_waits_for_a_record_of_a_prefix_that_does_not_exist_yet(root: str) -> None:
    with pytest.raises(RecordTimeout, match="the store that the server was started with"):
        open_reader("s3", {"root": f"{root}/later"}).get(Handle("s3", "key"), 0.2)
