from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from hs_connectors import Handle, open_backend, open_reader, open_writer
from hs_connectors.errors import SettingsError, StorageError
from hs_connectors.record import pack
from hs_connectors.testing import assert_same, make_record


@pytest.fixture
def space() -> Iterator[str]:
    name = f"test-{uuid4().hex}"
    yield name
    shutil.rmtree(f"/dev/shm/draftsmith-{name}", ignore_errors=True)


def test_a_record_is_mapped_and_not_copied(space: str) -> None:
    record = make_record(40_000)
    handle = open_writer("shm", {"space": space}).put("key", record)
    reader = open_reader("shm", {"space": space})
    got = reader.get(handle, 1)
    where = got.hidden_states.data_ptr()
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if f"draftsmith-{space}" in line]
    bounds = [tuple(int(text, 16) for text in line.split()[0].split("-")) for line in maps]
    assert any(begin <= where < end for begin, end in bounds)
    reader.delete(handle)
    assert_same(got, record)
    del got
    assert f"draftsmith-{space}" not in Path("/proc/self/maps").read_text(), "the mapping outlives its record"


def test_a_full_space_makes_its_writer_wait_for_readers(space: str) -> None:
    size = len(pack(make_record(1000)))
    config = {"space": space, "max_bytes": int(2.5 * size), "full_timeout_s": 20}
    writer, reader = open_writer("shm", config), open_reader("shm", {"space": space})
    for key in ("a", "b"):
        writer.put(key, make_record(1000))
    threading.Timer(0.3, reader.delete, (Handle("shm", "a"),)).start()
    started = time.monotonic()
    writer.put("c", make_record(1000))
    assert 0.2 < time.monotonic() - started < 10
    assert {entry.key for entry in open_backend("shm", config).entries()} == {"b", "c"}


def test_a_space_that_stays_full_fails_the_record_and_still_takes_its_marker(space: str) -> None:
    size = len(pack(make_record(1000)))
    writer = open_writer("shm", {"space": space, "max_bytes": size, "full_timeout_s": 0.1})
    writer.put("a", make_record(1000))
    with pytest.raises(StorageError, match=r"stayed full[\s\S]*hs gc"):
        writer.put("b", make_record(1000))
    with pytest.raises(StorageError, match=r"larger than the whole space[\s\S]*shm-size"):
        writer.put("c", make_record(2000))
    writer.fail("b", "full")
    assert {entry.kind for entry in open_backend("shm", {"space": space}).entries()} == {"record", "error"}


def test_what_lies_there_from_an_earlier_engine_counts(space: str) -> None:
    size = len(pack(make_record(1000)))
    open_writer("shm", {"space": space}).put("left", make_record(1000))
    with pytest.raises(StorageError, match="stayed full"):
        open_writer("shm", {"space": space, "max_bytes": size + 10, "full_timeout_s": 0}).put("b", make_record(1000))


@pytest.mark.parametrize("wrong", ["", "..", "a/b", "x" * 65, None])
def test_a_space_is_a_plain_name(wrong: object) -> None:
    with pytest.raises(SettingsError, match="space"):
        open_backend("shm", {"space": wrong})


def test_a_space_of_somebody_else_is_refused(space: str, monkeypatch: pytest.MonkeyPatch) -> None:
    open_writer("shm", {"space": space})
    assert Path(f"/dev/shm/draftsmith-{space}").stat().st_mode & 0o077 == 0
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(StorageError, match="another user"):
        open_writer("shm", {"space": space})
