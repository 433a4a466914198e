from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from speculators_core.errors import DiskSpaceError, StoreError, TrainingError
from speculators_core.training import checkpoints
from speculators_core.training.checkpoints import Checkpoint


def make(step: int) -> Checkpoint:
    return Checkpoint({"model": {"w": torch.full((64,), float(step))}, "random": {}}, {"step": step})


def save_steps(root: Path, *steps: int) -> None:
    for step in steps:
        checkpoints.save(checkpoints.path_of(root, step), make(step))


def test_round_trip(tmp_path: Path) -> None:
    save_steps(tmp_path, 3)
    loaded = checkpoints.load(checkpoints.path_of(tmp_path, 3))
    assert loaded.state == {"step": 3}
    assert torch.equal(loaded.tensors["model"]["w"], torch.full((64,), 3.0))
    assert loaded.tensors["random"] == {}


def truncate(path: Path) -> None:
    os.truncate(path / "model.safetensors", 100)


def flip(path: Path) -> None:
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-5] ^= 1
    (path / "model.safetensors").write_bytes(data)


def lose_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def tear_manifest(path: Path) -> None:
    (path / "manifest.json").write_text((path / "manifest.json").read_text()[:40])


def lose_state(path: Path) -> None:
    (path / "state.json").unlink()


@pytest.mark.parametrize("tear", [truncate, flip, lose_manifest, tear_manifest, lose_state])
def test_torn_newest_is_reported_and_the_previous_used(tmp_path: Path, tear: Any) -> None:
    save_steps(tmp_path, 1, 2)
    newest = checkpoints.path_of(tmp_path, 2)
    tear(newest)
    with pytest.raises(TrainingError, match="is damaged"):
        checkpoints.load(newest)
    found, reports = checkpoints.latest(tmp_path)
    assert found == checkpoints.path_of(tmp_path, 1)
    assert len(reports) == 1 and "step-00000002" in reports[0]
    assert not newest.exists() and newest.with_name("step-00000002.damaged").is_dir()
    assert checkpoints.latest(tmp_path) == (found, [])


def test_retention_keeps_the_newest_and_never_touches_foreign_files(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 10, 9)
    foreign = [tmp_path / "dataset", tmp_path / "step-3", tmp_path / "step-00000001-notes", tmp_path / "step-00000000"]
    for path in foreign:
        path.mkdir()
        (path / "precious.txt").write_text("mine")
    (tmp_path / ".step-00000011.partial").mkdir()
    gone = {path.name for path in checkpoints.prune(tmp_path, 2)}
    assert gone == {"step-00000001", "step-00000002", ".step-00000011.partial"}
    assert all((path / "precious.txt").read_text() == "mine" for path in foreign)
    assert {path.name for path in tmp_path.iterdir()} - {path.name for path in foreign} == {
        "step-00000009",
        "step-00000010",
    }


def test_replacing_keeps_one_whole_version_at_every_moment(tmp_path: Path) -> None:
    best = tmp_path / "best"
    checkpoints.save(best, make(1))
    shutil.move(best, tmp_path / ".best.old")  # killed between the two renames of a replacement
    checkpoints.mend_replace(best)
    assert checkpoints.load(best).state == {"step": 1}
    checkpoints.save(best, make(2))
    checkpoints.mend_replace(best)
    assert checkpoints.load(best).state == {"step": 2}


def test_full_disk_is_refused_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_steps(tmp_path, 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))  # type: ignore[attr-defined]
    with pytest.raises(DiskSpaceError, match=r"no space for checkpoint .*step-00000002"):
        save_steps(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert checkpoints.find_damage(checkpoints.path_of(tmp_path, 1)) is None


@pytest.mark.parametrize("fails_at", ["save_file", "fsync"])
def test_disk_that_fills_while_writing_leaves_the_previous_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: str
) -> None:
    save_steps(tmp_path, 1)

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    target = checkpoints.safetensors.torch if fails_at == "save_file" else checkpoints.os
    monkeypatch.setattr(target, fails_at, full)
    with pytest.raises(DiskSpaceError, match="goes on from the previous checkpoint"):
        checkpoints.save(checkpoints.path_of(tmp_path, 1), make(9))
    monkeypatch.undo()
    assert checkpoints.load(checkpoints.path_of(tmp_path, 1)).state == {"step": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_other_failures_are_store_errors(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be written"):
        checkpoints.save(tmp_path / "file" / "step-00000001", make(1))
