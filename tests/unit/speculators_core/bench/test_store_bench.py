from __future__ import annotations

from pathlib import Path

import pytest

from hs_connectors.errors import UnknownName
from speculators_core.bench.store import bench_store


def test_a_store_is_measured_beside_plain_files(tmp_path: Path) -> None:
    speed = bench_store(f"file:{tmp_path}", tmp_path / "home", mib=1, rounds=2)
    assert speed.num_bytes == 1 << 20 and speed.put_gb_s > 0 and speed.get_gb_s > 0
    assert speed.ratio is not None and speed.raw_put_gb_s is not None and "raw" in speed.line()
    assert list(tmp_path.iterdir()) == []


def test_a_backend_alone_is_a_store_that_is_made_for_it(tmp_path: Path) -> None:
    assert bench_store("shm", tmp_path, mib=1, rounds=1).put_gb_s > 0


def test_a_store_without_a_plainer_way_is_measured_alone(tmp_path: Path) -> None:
    speed = bench_store("memory:bench", tmp_path, codec="fp8", mib=1, rounds=1)
    assert speed.codec == "fp8" and speed.ratio is None and speed.raw_get_gb_s is None


def test_an_unknown_codec_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="fp8, none"):
        bench_store(f"file:{tmp_path}", tmp_path / "home", codec="zip")
