"""The same suite over every backend of the registry: a new one is tested before it has tests."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import s3fs
import torch
from safetensors.torch import save

from hs_connectors import BACKENDS, open_backend
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
WEIGHTS = save({"lm_head.weight": torch.ones(4, 4)})
NOTES = (b'{"code": 1}', b'{"error": "a note", "author": "somebody"}', b'{"error": 5}', b"[]", b"not JSON", b"[" * 9999)
"""What somebody else may call `<key>.error.json`, or `<key>.record.json` on S3."""
SERVICES = {"s3": "s3_service", "mooncake": "mooncake_service"}


def space_of(name: str) -> str:
    return "test-" + name.replace("/", "-")[-59:]


def lay_files(root: Path) -> Callable[[], object]:
    """Whatever a directory may hold, under all names that the file backend knows."""
    outside = root.parent / f"outside-{secrets.token_hex(4)}"
    (root / "model.safetensors").write_bytes(WEIGHTS)
    for number, note in enumerate(NOTES):
        (root / f"note-{number}.error.json").write_bytes(note)
    for ending in (".safetensors", ".error.json"):
        os.mkfifo(root / f"pipe{ending}")
        (root / f"directory{ending}").mkdir()
        (root / f"link{ending}").symlink_to(outside)
        os.mknod(root / f"socket{ending}", stat.S_IFSOCK | 0o600)
    part = root / f".pipe.safetensors.{secrets.token_hex(8)}.part"
    os.mkfifo(part)
    os.utime(part, (0, 0))

    def look() -> dict[str, tuple[int, bytes]]:
        modes = {path: path.lstat().st_mode for path in root.iterdir()}
        files = {path: (mode, path.read_bytes() if stat.S_ISREG(mode) else b"") for path, mode in modes.items()}
        return {path.name: found for path, found in files.items() if not path.name.startswith("zz-")}

    return look


def lay_objects(root: str) -> Callable[[], object]:
    """Weights, with a manifest of ours beside them or without, and notes under the names of manifests."""
    files = s3fs.S3FileSystem(use_listings_cache=False)
    files.pipe_file(f"{root}/model.safetensors", WEIGHTS)
    files.pipe_file(f"{root}/named.safetensors", WEIGHTS)
    files.pipe_file(f"{root}/named.record.json", b'{"bytes": %d}' % len(WEIGHTS))
    for number, note in enumerate((*NOTES, b'{"bytes": -1}', b'{"bytes": 9, "author": "somebody"}')):
        files.pipe_file(f"{root}/note-{number}.record.json", note)
    return lambda: {path: files.cat_file(path) for path in files.find(root) if "/zz-" not in path}


def lay_values(config: Mapping[str, Any]) -> Callable[[], object]:
    """An object of some other program that names its own likewise."""
    store = open_backend("mooncake", config)._store  # type: ignore[attr-defined]
    name = f"{config['space']}/theirs"
    assert store.put(name, b"somebody's blocks of keys and values") == 0
    return lambda: bytes(store.get(name))


FOREIGN: dict[str, Callable[[Mapping[str, Any]], Callable[[], object]]] = {
    "file": lambda config: lay_files(Path(config["root"])),
    "mooncake": lay_values,
    "s3": lambda config: lay_objects(config["root"]),
    "shm": lambda config: lay_files(Path("/dev/shm", f"draftsmith-{config['space']}")),
}


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

    def lay_foreign(self, tmp_path: Path) -> Callable[[], object]:
        lay = FOREIGN.get(self.backend_name)
        return lay(self.make_config(tmp_path)) if lay else super().lay_foreign(tmp_path)


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
