"""A lock by name is a file lock as the store's, for which nobody waits for ever."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from speculators_core.errors import RegistryError
from speculators_core.locks import named_lock


def test_who_waits_for_a_name_says_so_and_gives_up_in_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    told = pytest.raises(RegistryError, match=f"process {os.getpid()} has held .*gc.lock for 0 s")
    with named_lock(tmp_path, "gc"), told, named_lock(tmp_path, "gc", timeout_s=0.1):
        pytest.fail("two hold it")
    assert "waiting for another process: the lock" in caplog.text
    with named_lock(tmp_path, "gc", timeout_s=0):
        pass


def test_names_that_are_no_file_names_have_locks_of_their_own(tmp_path: Path) -> None:
    with named_lock(tmp_path, "a/b", timeout_s=0), named_lock(tmp_path, "a_b", timeout_s=0):
        assert len(list(tmp_path.glob("*.lock"))) == 2
