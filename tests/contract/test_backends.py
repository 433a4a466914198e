"""The same suite over every backend of the registry: a new one is tested before it has tests."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from hs_connectors import BACKENDS
from hs_connectors.backends import file
from hs_connectors.testing import BackendContract
from tests.contract.chaos import run_chaos

CONFIGS: dict[str, Callable[[str, Any], Mapping[str, Any]]] = {
    "file": lambda name, _: {"root": name},
    "memory": lambda name, _: {"space": name},
    "mooncake": lambda name, server: {**server.config, "space": space_of(name)},
    "s3": lambda name, server: {"root": f"s3://{server.bucket}{name}"},
    "shm": lambda name, _: {"space": space_of(name), "max_bytes": 64 << 20},
}
SERVICES = {"s3": "s3_service", "mooncake": "mooncake_service"}


def space_of(name: str) -> str:
    return "test-" + name.replace("/", "-")[-59:]


@pytest.fixture(params=sorted(BACKENDS))
def backend(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, Any]]:
    """Its name, and the service that it needs."""
    name, service = str(request.param), None
    if name in SERVICES:
        service = request.getfixturevalue(SERVICES[name])
        for variable, value in service.environment.items():
            monkeypatch.setenv(variable, value)
    yield name, service
    shutil.rmtree(f"/dev/shm/draftsmith-{space_of(str(tmp_path))}", ignore_errors=True)


class TestRegisteredBackends(BackendContract):
    @pytest.fixture(autouse=True)
    def _select(self, backend: tuple[str, Any]) -> None:
        self.backend_name, self.service = backend

    def make_config(self, tmp_path: Path) -> Mapping[str, Any]:
        return CONFIGS[self.backend_name](str(tmp_path), self.service)


def test_every_backend_is_covered() -> None:
    assert set(CONFIGS) == set(BACKENDS)


@pytest.mark.parametrize("backend", ["file", "shm"], indirect=True)
def test_what_was_acknowledged_survives_kills(
    backend: tuple[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tests/trial/test_store_chaos.py` does the same with 10,000 records, and over S3 and Mooncake as well."""
    name, service = backend
    notes = tmp_path / "notes"
    notes.mkdir()
    outcome = run_chaos(
        name,
        CONFIGS[name](str(tmp_path), service),
        400,
        notes,
        pause_s=(0.005, 0.03),
        grow_old=lambda: monkeypatch.setattr(file, "_YOUNG_S", -60.0),
    )
    assert outcome.acknowledged == 400 and outcome.kills > 0, outcome
    assert outcome.lost == outcome.corrupt == outcome.left == [], outcome
