"""Remembered hashes only save time: what is wrong with them never becomes a fingerprint or an error."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from speculators_core.verifier.hashes import CACHE_NAME, HashCache, file_key


def written(tmp_path: Path) -> Path:
    """A file old enough to be remembered."""
    file = tmp_path / "weights"
    file.write_bytes(b"weights")
    return file


@pytest.mark.parametrize(
    "content", ['{"KEY": 5}', '{"KEY": "zz"}', '{"KEY": null}', '[["KEY", "zz"]]', '{"KEY": "', ""]
)
def test_what_is_no_table_of_sums_is_ignored(tmp_path: Path, content: str) -> None:
    file = written(tmp_path)
    (tmp_path / CACHE_NAME).write_text(content.replace("KEY", file_key(file)))
    assert HashCache.of_home(tmp_path).of(file) == hashlib.sha256(b"weights").hexdigest()


def test_a_home_that_cannot_be_written_costs_only_time(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.write_text("a file where a directory should be")
    cache = HashCache.of_home(home)
    cache.remember("key", "0" * 64)
    cache.save()
    assert cache.recall("key") == "0" * 64 and list(tmp_path.iterdir()) == [home]
