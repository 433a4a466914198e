"""The same suite over every backend of the registry: a new one is tested before it has tests."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from hs_connectors import BACKENDS
from hs_connectors.testing import BackendContract
from tests.services import S3Server

CONFIGS: dict[str, Callable[[str], Mapping[str, Any]]] = {
    "file": lambda name: {"root": name},
    "memory": lambda name: {"space": name},
    "s3": lambda name: {"root": f"s3://artifacts{name}"},
    "shm": lambda name: {"space": space_of(name), "max_bytes": 64 << 20},
}
SERVICES = {"s3": "s3_service"}


def space_of(name: str) -> str:
    return "test-" + name.replace("/", "-")[-59:]


@pytest.fixture(params=sorted(BACKENDS))
def backend(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name = str(request.param)
    if name in SERVICES:
        service: S3Server = request.getfixturevalue(SERVICES[name])
        for variable, value in service.environment.items():
            monkeypatch.setenv(variable, value)
    yield name
    shutil.rmtree(f"/dev/shm/draftsmith-{space_of(str(tmp_path))}", ignore_errors=True)


class TestRegisteredBackends(BackendContract):
    @pytest.fixture(autouse=True)
    def _select(self, backend: str) -> None:
        self.backend_name = backend

    def make_config(self, tmp_path: Path) -> Mapping[str, Any]:
        return CONFIGS[self.backend_name](str(tmp_path))


def test_every_backend_is_covered() -> None:
    assert set(CONFIGS) == set(BACKENDS)
