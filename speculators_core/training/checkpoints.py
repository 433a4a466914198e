"""Checkpoints that are whole or absent: safetensors and JSON, a checksummed manifest written last.

    <root>/step-00000400/model.safetensors      trainable parameters (fp32) and the model's persistent buffers
                         optimizer.safetensors  optimiser state, flat, by parameter name
                         random.safetensors     state of the random generators, one entry for each rank's device
                         state.json             step, epoch, position in the epoch, what callbacks remember
                         manifest.json          size and sha256 of the above; makes the directory a checkpoint

Only directories of this shape are ever deleted.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from speculators_core.errors import DiskSpaceError, StoreError, TrainingError

log = logging.getLogger(__name__)

SCHEMA = 1
MANIFEST = "manifest.json"
_NAME = re.compile(r"^step-(\d{8,})$")
_PARTIAL = re.compile(r"^\.(?:step-\d{8,}|best)\.(?:partial|old)$")


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint in memory: tensors by file stem, and the JSON state."""

    tensors: Mapping[str, Mapping[str, Tensor]]
    state: Mapping[str, Any]


def save(directory: Path, checkpoint: Checkpoint) -> Path:
    """Write `checkpoint` to `directory`, replacing it as one act. Returns the directory.

    Raises:
        DiskSpaceError: not enough space; what was there before is untouched.
        StoreError: the file system refused otherwise.
    """
    partial = directory.parent / f".{directory.name}.partial"
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        _require_space(directory.parent, checkpoint)
        partial.mkdir()
        for stem, tensors in checkpoint.tensors.items():
            dense = {name: value.contiguous() for name, value in tensors.items()}
            safetensors.torch.save_file(dense, partial / f"{stem}.safetensors")
        (partial / "state.json").write_text(json.dumps(checkpoint.state, indent=1))
        files = {path.name: _entry(path) for path in sorted(partial.iterdir())}
        _write_synced(partial / MANIFEST, json.dumps({"schema": SCHEMA, "files": files}, indent=1))
        _replace(partial, directory)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise _explain(error, directory) from error
    return directory


def load(directory: Path) -> Checkpoint:
    """Read a checkpoint, after its manifest has been checked.

    Raises:
        TrainingError: it is torn or was changed; the message says which file.
    """
    problem = find_damage(directory)
    if problem is not None:
        raise TrainingError(
            f"checkpoint {directory} is damaged: {problem}", mend="delete it: the previous one will be used"
        )
    tensors = {path.stem: safetensors.torch.load_file(path) for path in sorted(directory.glob("*.safetensors"))}
    return Checkpoint(tensors, json.loads((directory / "state.json").read_text()))


def find_damage(directory: Path) -> str | None:
    """What is wrong with a checkpoint, or None when every file is as the manifest says."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        files = dict(manifest["files"])
        if manifest["schema"] != SCHEMA:
            return f"schema {manifest['schema']}, this version reads {SCHEMA}"
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (ValueError, KeyError, TypeError):
        return f"{MANIFEST} cannot be read"
    for name, expected in files.items():
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != expected["size"]:
            return f"{name} has {path.stat().st_size} bytes, not {expected['size']}"
        if _sha256(path) != expected["sha256"]:
            return f"{name} does not match its checksum"
    return None


def latest(root: Path) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint under `root`, and a sentence for each newer one that is damaged.

    A damaged one is renamed to `<name>.damaged`, so that it is neither used, counted nor lost.
    """
    reports: list[str] = []
    for _, directory in sorted(_numbered(root), reverse=True):
        problem = find_damage(directory)
        if problem is None:
            return directory, reports
        aside = directory.with_name(f"{directory.name}.damaged")
        shutil.rmtree(aside, ignore_errors=True)
        directory.rename(aside)
        reports.append(f"checkpoint {directory} is damaged ({problem}); set aside as {aside.name}")
    return None, reports


def path_of(root: Path, step: int) -> Path:
    """Where the checkpoint of a step lives."""
    return root / f"step-{step:08d}"


def prune(root: Path, keep: int) -> list[Path]:
    """Delete all but the newest `keep` checkpoints, and what a kill left half-written. Returns what went."""
    if not root.is_dir():
        return []
    whole = [path for _, path in sorted(_numbered(root), reverse=True) if (path / MANIFEST).is_file()]
    gone = whole[keep:] + [path for path in root.iterdir() if _PARTIAL.match(path.name)]
    for path in gone:
        shutil.rmtree(path, ignore_errors=True)
    return gone


def mend_replace(directory: Path) -> None:
    """Finish a replacement of `directory` that a kill interrupted between its two renames."""
    old = directory.parent / f".{directory.name}.old"
    if old.is_dir() and not directory.exists():
        old.rename(directory)


def _replace(partial: Path, directory: Path) -> None:
    old = directory.parent / f".{directory.name}.old"
    shutil.rmtree(old, ignore_errors=True)
    if directory.exists():
        directory.rename(old)
    partial.rename(directory)
    _sync_directory(directory.parent)
    shutil.rmtree(old, ignore_errors=True)


def _numbered(root: Path) -> list[tuple[int, Path]]:
    if not root.is_dir():
        return []
    matches = ((_NAME.match(path.name), path) for path in root.iterdir() if path.is_dir())
    return [(int(match.group(1)), path) for match, path in matches if match]


def _require_space(where: Path, checkpoint: Checkpoint) -> None:
    need = sum(t.numel() * t.element_size() for part in checkpoint.tensors.values() for t in part.values()) + (1 << 20)
    free = shutil.disk_usage(where).free
    if free < need:
        raise OSError(errno.ENOSPC, f"{need / 2**20:.0f} MiB needed, {free / 2**20:.0f} MiB free")


def _explain(error: Exception, directory: Path) -> StoreError:
    full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error)
    if full:
        return DiskSpaceError(
            f"no space for checkpoint {directory}: {error}",
            mend="free some space and start the same command again: it goes on from the previous checkpoint",
        )
    return StoreError(f"checkpoint {directory} cannot be written: {error}", mend="check the directory's permissions")


def _entry(path: Path) -> dict[str, Any]:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
    return {"size": path.stat().st_size, "sha256": _sha256(path)}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_synced(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
