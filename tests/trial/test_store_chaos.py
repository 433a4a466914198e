"""10,000 records through each backend while writers and readers are killed: none lost, none corrupt, none left."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import s3fs

from hs_connectors.backends import file, s3
from tests.contract.chaos import run_chaos
from tests.services import MooncakeServer, S3Server

pytestmark = pytest.mark.trial

RECORDS = 10_000

QUICK_S, SLOW_S, MOONCAKE_S = (0.05, 0.5), (1.0, 5.0), (0.6, 1.4)
"""Between two kills: a client of S3 is not made in less than a second; Mooncake is done with all in twenty."""

Prove = Callable[[str, Mapping[str, Any], tuple[float, float]], None]


@pytest.fixture
def prove(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Prove:
    def run(backend: str, config: Mapping[str, Any], pause_s: tuple[float, float]) -> None:
        def grow_old() -> None:
            monkeypatch.setattr(file, "_YOUNG_S", -60.0)
            monkeypatch.setattr(s3, "_ABANDONED_S", -60.0)

        notes = tmp_path / "notes"
        notes.mkdir()
        outcome = run_chaos(backend, config, RECORDS, notes, pause_s=pause_s, grow_old=grow_old)
        with capsys.disabled():
            print(f"\n{outcome.line()}")
        assert outcome.acknowledged == RECORDS and outcome.kills >= 10
        assert outcome.lost == outcome.corrupt == outcome.left == []
        assert max(outcome.growth_mib) < 32

    return run


@pytest.fixture
def space() -> Iterator[str]:
    name = f"chaos-{uuid4().hex}"
    yield name
    shutil.rmtree(f"/dev/shm/draftsmith-{name}", ignore_errors=True)


def test_file(tmp_path: Path, prove: Prove) -> None:
    prove("file", {"root": str(tmp_path / "store"), "fsync": False}, QUICK_S)
    assert list((tmp_path / "store").iterdir()) == []


def test_shm(space: str, prove: Prove) -> None:
    prove("shm", {"space": space, "max_bytes": 4 << 20}, QUICK_S)
    assert list(Path(f"/dev/shm/draftsmith-{space}").iterdir()) == []


def test_s3(s3_environment: S3Server, prove: Prove) -> None:
    root = f"s3://{s3_environment.bucket}/{uuid4().hex}"
    prove("s3", {"root": root}, SLOW_S)
    found = s3fs.S3FileSystem(use_listings_cache=False).find(root)
    assert [path for path in found if f"s3://{path}" != root] == [], "SeaweedFS keeps an emptied directory's name"


def test_mooncake(mooncake_service: MooncakeServer, prove: Prove) -> None:
    prove("mooncake", {**mooncake_service.config, "space": "chaos"}, MOONCAKE_S)
