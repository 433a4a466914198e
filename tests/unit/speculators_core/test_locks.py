"""A lock by name is a file lock as the store's, for which nobody waits for ever."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from speculators_core.errors import RegistryError, StoreError
from speculators_core.locks import named_lock
from tests.full_disk import full_disk


def test_who_waits_for_a_name_says_so_and_gives_up_in_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    told = pytest.raises(RegistryError, match=f"process {os.getpid()} has held .*gc.lock for 0 s")
    with named_lock(tmp_path, "gc"), told, named_lock(tmp_path, "gc", timeout_s=0.1):
        pytest.fail("two hold it")
    assert "waiting for another process: the lock" in caplog.text
    with named_lock(tmp_path, "gc", timeout_s=0):
        pass


def test_a_full_disk_has_no_room_for_the_holders_name_and_the_lock_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gc.lock").write_text("12345")
    told = pytest.raises(RegistryError, match=r"process \(unknown\) has held .*gc.lock for 0 s")
    with full_disk(monkeypatch), named_lock(tmp_path, "gc"), told, named_lock(tmp_path, "gc", timeout_s=0.1):
        pytest.fail("two hold it")


def test_where_a_full_disk_has_no_room_for_the_lock_only_who_may_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told = pytest.raises(StoreError, match="the disk is full while taking a lock")
    with full_disk(monkeypatch), told, named_lock(tmp_path / "locks", "gc"):
        pytest.fail("it cannot be held")
    with full_disk(monkeypatch), named_lock(tmp_path / "locks", "gc", even_full=True):
        assert "nothing keeps others off the lock" in caplog.text
    assert not (tmp_path / "locks").exists()


def test_names_that_are_no_file_names_have_locks_of_their_own(tmp_path: Path) -> None:
    with named_lock(tmp_path, "a/b", timeout_s=0), named_lock(tmp_path, "a_b", timeout_s=0):
        assert len(list(tmp_path.glob("*.lock"))) == 2
