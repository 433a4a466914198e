"""A draft as the engine is given it: alone, with its verifier where we know it to be, or stitched into that one."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from speculators_core import registry
from speculators_core.engine.client import EngineClient
from speculators_core.engine.runtime import Runtime
from speculators_core.errors import EvaluationError, FormatError
from speculators_core.formats.directory import MASK_EMBEDDING
from speculators_core.types import Json

SPECULATION = "draftsmith-speculation.json"
"""Beside a stitched verifier: the engine's speculative configuration, which no draft's config.json states there."""


def drafted_tokens(draft_dir: Path) -> int:
    """Tokens a step that the draft's own config asks for.

    Raises: FormatError where the directory is no draft.
    """
    config = _read_config(draft_dir)
    try:
        return int(config["speculators_config"]["proposal_methods"][0]["speculative_tokens"])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise FormatError(
            f"{draft_dir}/config.json does not say how many tokens to draft",
            mend="export the draft again, or set evaluation.k",
        ) from error


def speculation(served: Path, k: int | None) -> dict[str, Json] | None:
    """What the engine must be told beside a directory from `served_directory` to draft k tokens (None: its own number).

    A draft that is served alone brings its method, its verifier and its K.
    """
    path = served / SPECULATION
    told: dict[str, Json] = json.loads(path.read_text()) if path.is_file() else {}
    if k is not None:
        told["num_speculative_tokens"] = k
    return told or None


def draft_digest(draft_dir: Path) -> str:
    """sha256 over what an engine reads of a draft, wherever the directory lies."""
    _read_config(draft_dir)
    digest = hashlib.sha256()
    for path in sorted([draft_dir / "config.json", *draft_dir.glob("*.safetensors"), *draft_dir.glob(MASK_EMBEDDING)]):
        with path.open("rb") as file:
            digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def served_name(digest: str) -> str:
    """Name under which a server of somebody else offers the draft of that digest: how it says what it serves."""
    return f"draft-{digest[:16]}"


def require_served(runtime: Runtime, digest: str) -> None:
    """Refuse to measure one draft and write it down for another.

    Raises:
        EvaluationError: the server of that URL offers something else than the draft of that digest.
        EngineError: nobody answers.
    """
    if runtime.url is None:
        return
    with EngineClient(runtime.url, timeout_s=10, api_key=runtime.api_key()) as client:
        names = client.model_names()
    if served_name(digest) not in names:
        raise EvaluationError(
            f"the server at {runtime.url} serves {', '.join(names)}, and {served_name(digest)} is to be measured",
            mend="start it with what `draftsmith runtime flags RECIPE --draft DIR` prints for that draft",
        )


@contextmanager
def served_directory(draft_dir: Path, verifier_dir: Path, scratch: Path) -> Iterator[Path]:
    """The draft as a directory that names `verifier_dir` as its verifier, for `--model`.

    vLLM serves a draft alone by the verifier that its config names. Where that is another path or a hub id, a
    temporary directory under `scratch` stands in: the same weights by symbolic link, and a config.json with our
    path. So any draft can be measured on any verifier, the incumbent on a new verifier included.

    A draft of an algorithm that is served by its verifier is stitched into a copy of `verifier_dir` there.
    """
    config = _read_config(draft_dir)
    kind = str(config.get("speculators_model_type"))
    stitch = registry.resolve(kind).stitch if kind in registry.names() else None
    if stitch is not None:
        scratch.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="stitched-", dir=scratch) as name:
            whole = Path(name) / "model"
            stitch(draft_dir, verifier_dir, whole, link=True)
            told = {"method": kind, "num_speculative_tokens": drafted_tokens(draft_dir)}
            (whole / SPECULATION).write_text(json.dumps(told) + "\n")
            yield whole
        return
    verifier = config.get("speculators_config", {}).get("verifier", {})
    target = str(verifier_dir.resolve())
    if verifier.get("name_or_path") == target:
        yield draft_dir
        return
    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="draft-", dir=scratch) as name:
        view = Path(name)
        for path in draft_dir.iterdir():
            if path.name != "config.json":
                (view / path.name).symlink_to(path.resolve())
        patched = config | {
            "speculators_config": config.get("speculators_config", {})
            | {"verifier": {**verifier, "name_or_path": target}}
        }
        (view / "config.json").write_text(json.dumps(patched, indent=2, sort_keys=True) + "\n")
        yield view


def _read_config(draft_dir: Path) -> dict[str, Any]:
    path = draft_dir / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise FormatError(f"{path} cannot be read: {error}", mend="give the directory of an exported draft") from error
    if not isinstance(config, dict) or "speculators_config" not in config:
        raise FormatError(
            f"{draft_dir} is no draft: its config.json has no speculators_config",
            mend="give the directory of an exported draft, not of its verifier",
        )
    return config
