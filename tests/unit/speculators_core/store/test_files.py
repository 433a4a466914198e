"""File-system habits of the store."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from speculators_core.errors import StoreError
from speculators_core.store.files import file_lock, write_atomic


def test_a_place_that_cannot_be_written_is_an_error_of_ours_and_not_that_of_the_clean_up(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot go on while writing"):
        write_atomic(tmp_path / "file" / "inner", lambda part: part.write_text("x"))


def test_who_waited_for_a_lock_whose_file_was_deleted_meets_others_at_the_new_one(tmp_path: Path) -> None:
    lock, waits, holds, done = tmp_path / "lock", threading.Event(), threading.Event(), threading.Event()

    def wait_for_it() -> None:
        with file_lock(lock, "the file", look=waits.set):
            holds.set()
            done.wait(10)

    waiter = threading.Thread(target=wait_for_it)
    with file_lock(lock, "the file"):
        waiter.start()
        assert waits.wait(10)
        lock.unlink()
    assert holds.wait(10) and lock.is_file()

    class Refused(Exception):
        pass

    def refuse() -> None:
        raise Refused

    with pytest.raises(Refused), file_lock(lock, "the file", look=refuse):
        pytest.fail("two hold it")
    done.set()
    waiter.join()
