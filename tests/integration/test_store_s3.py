"""The artifact store on a real S3 server: SeaweedFS, one binary, on loopback."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from uuid import uuid4

import pytest

from speculators_core.errors import StoreError
from speculators_core.store import Store, input_digest
from tests.services import S3Server, free_port

KEY = input_digest("capture", 1, {"rows": "abc"})


@pytest.fixture(scope="module")
def s3(s3_environment: S3Server) -> str:
    """URL of a bucket; credentials and endpoint are in the environment."""
    return f"s3://{s3_environment.bucket}"


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
