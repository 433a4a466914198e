"""The same suite over every backend of the registry: a new one is tested before it has tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from hs_connectors import BACKENDS
from hs_connectors.testing import BackendContract

CONFIGS: dict[str, Callable[[Path], Mapping[str, Any]]] = {
    "file": lambda tmp: {"root": str(tmp / "store")},
    "memory": lambda tmp: {"space": str(tmp)},
}


@pytest.fixture(params=sorted(BACKENDS))
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class TestRegisteredBackends(BackendContract):
    @pytest.fixture(autouse=True)
    def _select(self, backend: str) -> None:
        self.backend_name = backend

    def make_config(self, tmp_path: Path) -> Mapping[str, Any]:
        return CONFIGS[self.backend_name](tmp_path)


def test_every_backend_is_covered() -> None:
    assert set(CONFIGS) == set(BACKENDS)
