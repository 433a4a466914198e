"""The store keeps its promises: all or nothing, verified hits, one computation at a time."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from uuid import uuid4

import pytest

from speculators_core.errors import StoreError
from speculators_core.store import Manifest, Store, files, input_digest
from speculators_core.store.remote import Unreachable

KEY = input_digest("capture", 1, {"rows": "abc", "layers": [2, 15]})


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    root = str(tmp_path / "store") if request.param == "local" else f"memory://{uuid4().hex}/store"
    return Store(root, scratch=tmp_path / "scratch")


def fill(store: Store, content: bytes = b"0123456789" * 100) -> Path:
    workspace = store.workspace("states", KEY)
    (workspace / "inner").mkdir(exist_ok=True)
    (workspace / "a.bin").write_bytes(content)
    (workspace / "inner" / "b.json").write_text("{}")
    return workspace


def publish(store: Store, content: bytes = b"0123456789" * 100):
    return store.publish(fill(store, content), "states", KEY, {"rows": 3}, {"torch": "2"})


def test_a_published_artifact_is_found_with_its_bytes_and_facts(store: Store):
    assert store.find("states", KEY) is None
    ref = publish(store)
    assert store.find("states", KEY) == ref
    data = store.path(ref)
    assert (data / "a.bin").read_bytes() == b"0123456789" * 100
    assert sorted(path.name for path in data.rglob("*") if path.is_file()) == ["a.bin", "b.json"]
    manifest = store.manifest(ref)
    assert manifest.meta == {"rows": 3} and manifest.producer == {"torch": "2"}
    assert manifest.digest == ref.digest and manifest.num_bytes == 1002
    assert [*store.artifacts("states")] == [ref] and [*store.artifacts("draft")] == []
    store.remove(ref)
    assert store.find("states", KEY) is None
    with pytest.raises(StoreError, match="vanished"):
        store.path(ref)


def test_the_digest_names_the_bytes_and_not_the_place(tmp_path: Path):
    one = publish(Store(tmp_path / "one", scratch=tmp_path / "s1"))
    two = publish(Store(f"memory://{uuid4().hex}", scratch=tmp_path / "s2"))
    other = publish(Store(tmp_path / "three", scratch=tmp_path / "s3"), b"x")
    assert one.digest == two.digest != other.digest


def test_the_input_digest_follows_the_inputs_and_not_their_order():
    assert input_digest("capture", 1, {"layers": [2, 15], "rows": "abc"}) == KEY
    assert input_digest("capture", 2, {"layers": [2, 15], "rows": "abc"}) != KEY
    assert input_digest("capture", 1, {"layers": [15, 2], "rows": "abc"}) != KEY
    with pytest.raises(ValueError):
        input_digest("capture", 1, {"rate": float("nan")})


def damage_flip(data: Path) -> None:
    raw = bytearray((data / "a.bin").read_bytes())
    raw[500] ^= 1
    (data / "a.bin").write_bytes(raw)


def damage_flip_with_the_old_mtime(data: Path) -> None:
    facts = (data / "a.bin").stat()
    damage_flip(data)
    os.utime(data / "a.bin", ns=(facts.st_atime_ns, facts.st_mtime_ns))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (damage_flip, "a.bin was changed"),
        (damage_flip_with_the_old_mtime, "a.bin was changed"),
        (lambda data: (data / "a.bin").write_bytes(b"short"), "5 bytes instead of 1000"),
        (lambda data: (data / "inner" / "b.json").unlink(), "b.json is missing"),
        (lambda data: (data / "stray.py").write_text(""), "stray.py doesn't belong"),
        (lambda data: (data.parent / "manifest.json").unlink(), "no manifest"),
        (lambda data: (data.parent / "manifest.json").write_text('{"kind": '), "not a manifest"),
    ],
)
def test_tampering_is_a_miss_with_a_reason_and_is_mended_by_publishing(tmp_path, caplog, damage, reason):
    store = Store(tmp_path / "store", scratch=tmp_path / "scratch")
    ref = publish(store)
    damage(store.path(ref))
    with caplog.at_level(logging.WARNING):
        assert store.find("states", KEY) is None
    assert reason in caplog.text
    with pytest.raises(StoreError):
        store.path(ref)
    assert publish(store) == ref == store.find("states", KEY)
    assert (store.path(ref) / "a.bin").read_bytes() == b"0123456789" * 100


def test_tampering_with_a_remote_artifact_is_a_miss(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    import fsspec

    root = f"{uuid4().hex}/store"
    ref = publish(Store(f"memory://{root}", scratch=tmp_path / "one"))
    memory = fsspec.filesystem("memory")
    (remote,) = [path for path in memory.find(root) if path.endswith("a.bin")]
    time.sleep(0.01)
    memory.pipe_file(remote, b"9" + b"0123456789" * 99 + b"012345678")
    for scratch in ("one", "two"):  # the publisher itself, and a machine that sees it for the first time
        assert Store(f"memory://{root}", scratch=tmp_path / scratch).find("states", KEY) is None
    assert "a.bin was changed" in caplog.text
    assert publish(Store(f"memory://{root}", scratch=tmp_path / "one")).digest == ref.digest


def test_a_remote_artifact_is_downloaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    root = f"memory://{uuid4().hex}"
    ref = publish(Store(root, scratch=tmp_path / "one"))
    reader = Store(root, scratch=tmp_path / "two")
    first = reader.path(ref)
    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.get", None)
    assert reader.find("states", KEY) == ref and reader.path(ref) == first
    damage_flip(first)
    with pytest.raises(StoreError):  # the local copy is bad now: it would be fetched again
        reader.path(ref)


def test_no_answer_is_an_error_and_not_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = Store(f"memory://{uuid4().hex}", scratch=tmp_path)

    def refuse(*_: object, **__: object) -> bytes:
        raise ConnectionRefusedError("no route")

    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.cat_file", refuse)
    with pytest.raises(Unreachable, match="no route"):
        store.find("states", KEY)


def test_one_failed_read_leaves_no_artifact_out_of_a_listing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = Store(f"memory://{uuid4().hex}", scratch=tmp_path)
    publish(store)

    def refuse(*_: object, **__: object) -> bytes:
        raise OSError("503 Slow Down")

    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.cat_file", refuse)
    with pytest.raises(Unreachable, match="503"):
        list(store.artifacts())


@pytest.mark.parametrize("fault", ["not JSON", '"schema_version": 2'])
def test_a_listing_on_which_something_hangs_names_the_manifest_that_cannot_be_read(tmp_path: Path, fault: str):
    store = Store(tmp_path / "store", scratch=tmp_path / "scratch")
    publish(store)
    manifest = tmp_path / "store" / "states" / KEY / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"schema_version": 1', fault))
    assert list(store.artifacts()) == []
    with pytest.raises(StoreError, match=f"states/{KEY} cannot be read(?s:.*)mend: use the version .* or delete"):
        list(store.artifacts(whole=True))


def test_a_manifest_that_the_disk_does_not_give_is_no_miss(tmp_path: Path):
    store = Store(tmp_path / "store", scratch=tmp_path / "scratch")
    publish(store)
    manifest = tmp_path / "store" / "states" / KEY / "manifest.json"
    manifest.unlink()
    manifest.symlink_to(manifest)
    with pytest.raises(Unreachable, match="symbolic links"):
        store.find("states", KEY)


def test_an_unknown_protocol_says_how_to_mend_it(tmp_path: Path):
    with pytest.raises(StoreError, match="mend: install"):
        Store("nosuch://bucket", scratch=tmp_path)


def test_a_second_look_hashes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = Store(tmp_path / "store", scratch=tmp_path / "scratch")
    ref = publish(store)
    monkeypatch.setattr(files, "sha256_file", lambda path: pytest.fail(f"hashed {path}"))
    assert store.find("states", KEY) == ref


def test_a_moved_store_still_opens_its_artifacts(tmp_path: Path):
    ref = publish(Store(tmp_path / "old", scratch=tmp_path / "scratch"))
    (tmp_path / "old").rename(tmp_path / "new")
    assert (Store(tmp_path / "new", scratch=tmp_path / "scratch").path(ref) / "a.bin").exists()


def test_unfinished_files_and_links_are_not_published(store: Store, tmp_path: Path):
    workspace = fill(store)
    (workspace / "shard.safetensors.12-ab.part").write_bytes(b"torn")
    (workspace / "link").symlink_to(tmp_path)
    with pytest.raises(StoreError, match="not a plain file"):
        store.publish(workspace, "states", KEY)
    (workspace / "link").unlink()
    ref = store.publish(workspace, "states", KEY)
    assert [entry.path for entry in store.manifest(ref).files] == ["a.bin", "inner/b.json"]


def test_a_foreign_directory_can_be_published(store: Store, tmp_path: Path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.bin").write_bytes(b"abc")
    ref = store.publish(tmp_path / "mine", "draft", KEY)
    assert (store.path(ref) / "a.bin").read_bytes() == b"abc"


def test_a_full_disk_publishes_nothing_and_keeps_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = Store(tmp_path / "store", scratch=tmp_path / "scratch")
    workspace = fill(store)

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(files, "sync", full)
        with pytest.raises(StoreError, match=r"(?s)disk is full.*manifest\.json.*mend: free space"):
            store.publish(workspace, "states", KEY)
    assert store.find("states", KEY) is None
    assert not [path for path in tmp_path.rglob("*.part")]
    assert store.find("states", KEY) is None and (workspace / "a.bin").exists()
    assert store.publish(workspace, "states", KEY) == store.find("states", KEY)


def test_names_cannot_leave_the_root(tmp_path: Path):
    store = Store(tmp_path / "store", scratch=tmp_path / "scratch")
    for kind, digest in [("..", KEY), ("states", "../../etc"), ("", KEY), (".work", KEY)]:
        with pytest.raises(StoreError, match="cannot name"):
            store.workspace(kind, digest)
    entry = {"path": "../x", "size": 0, "sha256": "0" * 64}
    text = Manifest.model_validate({"kind": "a", "input_digest": "b", "files": [entry]}).to_json()
    with pytest.raises(StoreError, match="outside"):
        Manifest.parse(text, "somewhere")


def _publish_in_a_process(root: str, scratch: str, content: bytes, start: float) -> None:
    store = Store(root, scratch=Path(scratch))
    own = Path(scratch) / f"own-{os.getpid()}"
    own.mkdir(parents=True)
    (own / "a.bin").write_bytes(content)
    time.sleep(max(0.0, start - time.time()))
    ref = store.publish(own, "states", KEY)
    assert store.find("states", KEY) == ref


def test_two_publishers_at_once_leave_one_whole_artifact(tmp_path: Path):
    context = multiprocessing.get_context("spawn")
    start = time.time() + 2.0
    workers = [
        context.Process(
            target=_publish_in_a_process, args=(str(tmp_path / "store"), str(tmp_path / "s"), bytes([n]) * 999, start)
        )
        for n in range(3)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    store = Store(tmp_path / "store", scratch=tmp_path / "fresh")
    ref = store.find("states", KEY)
    assert ref is not None and len(set((store.path(ref) / "a.bin").read_bytes())) == 1


def test_publishing_a_used_up_workspace_returns_the_artifact(tmp_path: Path):
    store = Store(tmp_path / "store", scratch=tmp_path / "scratch")
    workspace = fill(store)
    assert store.publish(workspace, "states", KEY) == store.publish(workspace, "states", KEY)


def test_threads_compute_once(store: Store):
    computed = []

    def run() -> None:
        with store.single_flight("states", KEY):
            if store.find("states", KEY) is None:
                computed.append(1)
                time.sleep(0.05)
                publish(store)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert computed == [1]


def test_single_flight_and_workspace_survive_a_killed_holder(tmp_path: Path):
    script = textwrap.dedent("""
        import sys, time
        from pathlib import Path
        from speculators_core.store import Store
        store = Store(sys.argv[1], scratch=Path(sys.argv[2]))
        with store.single_flight("states", sys.argv[3]):
            (store.workspace("states", sys.argv[3]) / "shard-0").write_text("done")
            print("held", flush=True)
            time.sleep(60)
    """)
    arguments = [sys.executable, "-c", script, str(tmp_path / "store"), str(tmp_path / "scratch"), KEY]
    holder = subprocess.Popen(arguments, stdout=subprocess.PIPE, cwd=Path(__file__).parents[4])
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    threading.Timer(0.3, lambda: holder.send_signal(signal.SIGKILL)).start()
    store = Store(tmp_path / "store", scratch=tmp_path / "scratch")
    started = time.monotonic()
    with store.single_flight("states", KEY):
        assert 0.2 < time.monotonic() - started < 20
        assert (store.workspace("states", KEY) / "shard-0").read_text() == "done"
    holder.wait()
    holder.stdout.close()


def test_a_root_that_is_a_file_is_no_empty_store(tmp_path: Path):
    (tmp_path / "store").write_text("a file")
    with pytest.raises(StoreError, match="not a directory"):
        Store(tmp_path / "store", scratch=tmp_path / "scratch")


def test_a_directory_in_the_manifests_place_is_a_miss_and_is_replaced(tmp_path: Path):
    store = Store(tmp_path / "store", scratch=tmp_path / "scratch")
    publish(store)
    manifest = tmp_path / "store" / "states" / KEY / "manifest.json"
    manifest.unlink()
    manifest.mkdir()
    assert store.find("states", KEY) is None and list(store.artifacts()) == []
    ref = publish(store)
    assert store.find("states", KEY) == ref


def test_an_address_without_a_bucket_is_no_empty_store(tmp_path: Path):
    with pytest.raises(StoreError, match="no bucket"):
        Store("memory://", scratch=tmp_path)
