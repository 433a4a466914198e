from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

import pytest

from hs_connectors import Handle, Record, open_reader, open_writer
from hs_connectors.errors import CaptureFailed, StorageError
from hs_connectors.spool import Spool
from hs_connectors.testing import make_record


class GatedWriter:
    """A store that is slow until `gate` opens, and takes nothing at all while `broken`."""

    def __init__(self, space: str) -> None:
        self.inner = open_writer("memory", {"space": space})
        self.gate = threading.Event()
        self.broken: Exception | None = None

    def put(self, key: str, record: Record) -> Handle:
        self.gate.wait()
        self._refuse_if_broken()
        return self.inner.put(key, record)

    def fail(self, key: str, message: str) -> None:
        self._refuse_if_broken()
        self.inner.fail(key, message)

    def announce(self, facts: Mapping[str, Any]) -> None:
        self.inner.announce(facts)

    def _refuse_if_broken(self) -> None:
        if self.broken is not None:
            raise self.broken


def wait_until(condition: Any, timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


def make_spool(name: str, **options: Any) -> tuple[GatedWriter, Spool]:
    writer = GatedWriter(name)
    return writer, Spool(writer, **{"threads": 2, "max_bytes": 100, **options})


def test_submitting_never_waits_for_the_store_and_is_bounded_by_bytes() -> None:
    writer, spool = make_spool("bounded")
    assert spool.has_room(1000)  # a record larger than the bound is let through alone
    spool.submit("a", 60, make_record)
    assert spool.has_room(40) and not spool.has_room(41)
    spool.submit("b", 40, make_record)
    assert not spool.has_room(1)
    writer.gate.set()
    wait_until(lambda: spool.has_room(100))
    assert spool.close(10) == []


def test_who_held_its_data_back_is_told_of_room_and_needs_no_other_occasion() -> None:
    held = ["b", "c", "d"]
    written: list[str] = []

    def go_on() -> None:
        if held and spool.has_room(100):
            spool.submit(held.pop(0), 100, make_record)

    writer, spool = make_spool("room", threads=1, on_room=go_on)
    spool.submit("a", 100, make_record)
    assert not spool.has_room(100)
    writer.gate.set()
    reader = open_reader("memory", {"space": "room"})
    for key in "abcd":
        reader.get(Handle("memory", key), 10)
        written.append(key)
    assert written == ["a", "b", "c", "d"] and spool.close(10) == []


def test_closing_writes_out_what_is_queued() -> None:
    writer, spool = make_spool("drain", threads=1)
    for i in range(20):
        spool.submit(f"k{i}", 1, lambda i=i: make_record(seed=i))
    threading.Timer(0.2, writer.gate.set).start()
    assert spool.close(10) == []
    reader = open_reader("memory", {"space": "drain"})
    assert [reader.get(Handle("memory", f"k{i}"), 0).extra["seed"] for i in range(20)] == [str(i) for i in range(20)]


def test_what_cannot_be_written_before_the_end_fails_for_its_reader() -> None:
    writer, spool = make_spool("late", threads=1)
    spool.submit("slow", 1, make_record)
    spool.submit("queued", 1, make_record)
    assert spool.close(0.1) == ["queued", "slow"]
    for key in ("slow", "queued"):
        with pytest.raises(CaptureFailed, match="engine stopped"):
            open_reader("memory", {"space": "late"}).get(Handle("memory", key), 0)
    writer.gate.set()


@pytest.mark.parametrize("error", [RuntimeError("CUDA error"), MemoryError("none left"), KeyError("surprise")])
def test_whatever_goes_wrong_reaches_the_reader(error: Exception) -> None:
    writer, spool = make_spool(f"wrong-{error}")
    writer.gate.set()

    def produce() -> Record:
        raise error

    spool.submit("key", 1, produce)
    with pytest.raises(CaptureFailed, match=type(error).__name__):
        open_reader("memory", {"space": f"wrong-{error}"}).get(Handle("memory", "key"), 10)
    spool.submit("next", 1, make_record)
    assert open_reader("memory", {"space": f"wrong-{error}"}).get(Handle("memory", "next"), 10).dtype == "bfloat16"
    spool.close(10)


@pytest.mark.parametrize("error", [StorageError("read-only file system"), KeyError("read-only")])
def test_a_store_that_takes_nothing_is_reported_until_it_recovers(error: Exception) -> None:
    """Whatever it raises: its threads live, and there is room again for what comes after."""
    space = f"broken-{type(error).__name__}"
    writer, spool = make_spool(space)
    writer.gate.set()
    writer.broken = error
    for key in ("a", "b", "c"):
        spool.submit(key, 100, make_record)
    wait_until(lambda: spool.state().waiting == 0)
    assert "read-only" in str(spool.trouble) and spool.has_room(100)
    writer.broken = None
    wait_until(lambda: spool.trouble is None)
    for key in ("a", "b", "c"):
        with pytest.raises(CaptureFailed, match="read-only"):
            open_reader("memory", {"space": space}).get(Handle("memory", key), 0)
    spool.submit("next", 100, make_record)
    assert open_reader("memory", {"space": space}).get(Handle("memory", "next"), 10).dtype == "bfloat16"
    assert spool.close(10) == []


def test_a_hook_that_fails_and_a_key_that_comes_twice_cost_no_thread() -> None:
    def fail() -> None:
        raise KeyError("surprise")

    writer, spool = make_spool("hooks", threads=1, on_thread_start=fail, on_room=fail)
    for key in ("twice", "twice", "last"):
        spool.submit(key, 30, make_record)
    writer.gate.set()
    assert spool.close(10) == []
    assert (spool.state().written, spool.state().waiting_bytes) == (3, 0)


def test_a_record_that_could_not_be_copied_fails() -> None:
    writer, spool = make_spool("copy")
    writer.gate.set()
    spool.fail("key", "no memory for the copy")
    with pytest.raises(CaptureFailed, match="no memory"):
        open_reader("memory", {"space": "copy"}).get(Handle("memory", "key"), 10)
    spool.close(10)


def test_a_spool_says_what_it_did_and_what_waits() -> None:
    writer, spool = make_spool("state", threads=1)
    for i in range(3):
        spool.submit(f"k{i}", 30, make_record)
    spool.fail("bad", "no memory for the copy")
    time.sleep(0.05)
    state = spool.state()
    assert (state.written, state.failed, state.waiting, state.waiting_bytes) == (0, 0, 4, 90)
    assert 0.05 <= state.oldest_s < 5
    writer.gate.set()
    wait_until(lambda: spool.state().waiting == 0)
    state = spool.state()
    assert (state.written, state.failed, state.num_bytes, state.waiting_bytes, state.oldest_s) == (3, 1, 90, 0, 0)
    assert 0.15 <= state.lag_s < 30
    spool.close(10)
