from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hs_connectors import Handle, open_reader, open_writer
from hs_connectors.backends.file import FileBackend
from hs_connectors.errors import CaptureFailed, EntryError, RecordError, RecordTimeout, SettingsError, StorageError
from hs_connectors.record import pack
from hs_connectors.testing import make_record


def test_nothing_but_the_record_is_left(tmp_path: Path) -> None:
    open_writer("file", {"root": str(tmp_path)}).put("key", make_record())
    assert [path.name for path in tmp_path.iterdir()] == ["key.safetensors"]


def test_a_link_in_the_root_is_neither_read_nor_written_through(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    writer, reader = open_writer("file", {"root": str(root)}), open_reader("file", {"root": str(root)})
    outside.write_text("secret")
    (root / "key.safetensors").symlink_to(outside)
    with pytest.raises(StorageError, match="symbolic"):
        reader.get(Handle("file", "key"), 0)
    writer.put("key", make_record())
    assert outside.read_text() == "secret" and not (root / "key.safetensors").is_symlink()
    (root / "gone.safetensors").symlink_to(outside)
    with pytest.raises(EntryError, match="symbolic"):
        reader.delete(Handle("file", "gone"))
    assert outside.read_text() == "secret" and (root / "gone.safetensors").is_symlink()


@pytest.mark.parametrize("name", ["key.safetensors", "key.error.json", "engine.json"])
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    store = FileBackend({"root": str(tmp_path)})
    with pytest.raises(StorageError, match=r"no regular file[\s\S]*mend: .*move it away"):
        store.announcement() if name == "engine.json" else store.fetch("key", 30)


def test_an_announcement_that_is_none_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "engine.json").write_text("[1]")
    with pytest.raises(StorageError, match="not a JSON object"):
        FileBackend({"root": str(tmp_path)}).announcement()


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"schema": "draftsmith.states/1"}])
def test_weights_in_the_root_are_no_records_and_never_deleted(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    save_file({"lm_head.weight": torch.ones(4, 4)}, tmp_path / "model.safetensors", metadata=metadata)
    store = FileBackend({"root": str(tmp_path)})
    store.prepare()
    store.publish("row", pack(make_record(3)))
    store.publish("torn", b"torn")
    with pytest.raises(StorageError, match="not deleted"):
        store.discard("model")
    store.discard("row")
    store.discard("torn")
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("left", [0, 20, 400])
def test_a_record_that_is_cut_while_it_is_read_ends_where_it_was_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    path, size_of = tmp_path / "key.safetensors", os.fstat
    writer, reader = open_writer("file", {"root": str(tmp_path)}), open_reader("file", {"root": str(tmp_path)})

    def cut(descriptor: int) -> os.stat_result:
        """Somebody cuts the file when its reader knows its size and has not read it yet."""
        facts = size_of(descriptor)
        os.truncate(path, left)
        return facts

    writer.put("key", make_record(40))
    whole = path.read_bytes()
    monkeypatch.setattr(os, "fstat", cut)
    payload = FileBackend({"root": str(tmp_path)}).fetch("key", 0)
    assert bytes(payload) == whole[:left], "and nothing of what the memory held before"
    path.write_bytes(whole)
    with pytest.raises(RecordError):
        reader.get(Handle("file", "key"), 0)


def test_a_root_is_a_path() -> None:
    with pytest.raises(SettingsError, match="root"):
        FileBackend({"root": 3})


def test_leftovers_of_killed_writers_are_swept_and_live_ones_kept(tmp_path: Path) -> None:
    old = time.time() - 3600
    dead, alive, young = (tmp_path / f".{name}.safetensors.{'0a' * 8}.part" for name in ("dead", "alive", "young"))
    others = [tmp_path / ".model.safetensors.part", tmp_path / ".checkpoint.part"]
    for part in (dead, alive, young, others[0]):
        part.write_bytes(b"half")
    others[1].mkdir()
    for part in (dead, alive, *others):
        os.utime(part, (old, old))
    with alive.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        FileBackend({"root": str(tmp_path)}).prepare()
        assert not dead.exists() and alive.exists() and young.exists()
        assert all(part.exists() for part in others), "somebody else's downloads"


def test_a_writer_killed_in_the_middle_leaves_no_record(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "from hs_connectors.backends import file\n"
        "os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)\n"
        "file.FileBackend({'root': sys.argv[1]}).publish('key', b'x' * 100000)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    leftovers = list(tmp_path.iterdir())
    assert [path.suffix for path in leftovers] == [".part"]
    with pytest.raises(RecordTimeout):
        open_reader("file", {"root": str(tmp_path)}).get(Handle("file", "key"), 0)
    os.utime(leftovers[0], (0, 0))
    FileBackend({"root": str(tmp_path)}).prepare()
    assert not list(tmp_path.iterdir())


def test_a_root_that_is_no_directory_is_refused_before_the_first_record(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        open_writer("file", {"root": str(tmp_path / "file" / "root")})


def test_a_reader_may_be_opened_before_the_root_exists(tmp_path: Path) -> None:
    reader = open_reader("file", {"root": str(tmp_path / "later")})
    assert reader.announcement() is None
    threading.Timer(0.1, lambda: open_writer("file", {"root": str(tmp_path / "later")}).put("k", make_record())).start()
    assert reader.get(Handle("file", "k"), 10).token_ids.numel() == 7


def test_an_empty_marker_still_ends_the_wait(tmp_path: Path) -> None:
    (tmp_path / "key.error.json").touch()
    with pytest.raises(CaptureFailed, match="disk may be full"):
        open_reader("file", {"root": str(tmp_path)}).get(Handle("file", "key"), 1)


@pytest.fixture
def small_disk(tmp_path: Path) -> Path:
    """A file system of 64 KiB; needs the right to mount one."""
    root = tmp_path / "small"
    root.mkdir()
    mount = shutil.which("mount")
    if (
        mount is None
        or subprocess.run(
            [mount, "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(root)], check=False, capture_output=True
        ).returncode
    ):
        pytest.skip("mounting a small file system is not allowed here")
    yield root
    subprocess.run(["umount", str(root)], check=True)


def test_a_full_disk_publishes_an_error_in_place_of_the_record(small_disk: Path) -> None:
    writer, reader = open_writer("file", {"root": str(small_disk)}), open_reader("file", {"root": str(small_disk)})
    with pytest.raises(StorageError, match=r"refused record key[\s\S]*free some space"):
        writer.put("key", make_record(20_000))
    (small_disk / "ballast").write_bytes(b"x" * (64 << 10))
    writer.fail("key", "no space")
    with pytest.raises(CaptureFailed):
        reader.get(Handle("file", "key"), 1)
    assert not list(small_disk.glob(".*"))


@pytest.mark.parametrize("fsync", [True, False])
def test_a_payload_of_many_stretches_is_whole(tmp_path: Path, fsync: bool) -> None:
    """Pieces that begin and end anywhere between two hints to the disk."""
    backend = FileBackend({"root": str(tmp_path), "fsync": fsync})
    parts = [bytes([number]) * length for number, length in enumerate((5, 3 << 20, 1, (2 << 20) - 6, 4 << 20, 77))]
    backend.publish("key", *parts)
    assert bytes(backend.fetch("key", 1)) == b"".join(parts)
