"""The fingerprint of a verifier: a digest of everything that makes a draft stale when it changes.

Built from content only: where the files lie, how they came there and what the directory is called leave no trace, so
a hub snapshot and a local copy of the same bytes agree. Large files are hashed once and remembered by identity.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from speculators_core.errors import VerifierError
from speculators_core.store.manifest import sha256_file
from speculators_core.types import Json, StrictModel
from speculators_core.verifier.facts import read_config
from speculators_core.verifier.weights import weight_files

log = logging.getLogger(__name__)

PARTS = ("weights", "config", "generation_config", "tokenizer", "chat_template", "quantisation", "adapters")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "tiktoken.model",
    "tekken.json",
)
_QUANTISATION_FILES = ("hf_quant_config.json", "quantize_config.json", "quantization_config.json")
# Keys that say who wrote a file, not what the model is.
_VOLATILE = frozenset({"_name_or_path", "name_or_path", "transformers_version", "_commit_hash"})
# A file written within this many seconds could change again without its times changing: not remembered yet.
_RACY_SECONDS = 2.0


class Fingerprint(StrictModel):
    """Digest of a verifier, with the digest of each part so that a change can be named."""

    digest: str = Field(description="sha256 over the parts, in hex.")
    parts: dict[str, str] = Field(description="sha256 of each part; the digest of nothing where a part is absent.")

    def changed_parts(self, other: Fingerprint) -> tuple[str, ...]:
        """Names of the parts in which two fingerprints differ, in the order of PARTS."""
        return tuple(part for part in PARTS if self.parts.get(part) != other.parts.get(part))


def fingerprint(
    verifier_dir: Path, *, home: Path | None, template_kwargs: Mapping[str, Json] | None = None
) -> Fingerprint:
    """Fingerprint a local verifier (decisions 1 and 2 of the design).

    Args:
        verifier_dir: a transformers model directory.
        home: state root; hashes are remembered in `home/hash-cache.json` by device, inode, size and times. None: none.
        template_kwargs: keyword arguments for the chat template: they change what the verifier is shown.

    Raises:
        VerifierError: not a model directory, or its weights are missing.
    """
    config = read_config(verifier_dir)
    hashes = HashCache(home / "hash-cache.json" if home else None)
    quantisation = {
        "config": config.pop("quantization_config", None) or config.pop("compression_config", None),
        **{name: _json_or_none(verifier_dir / name) for name in _QUANTISATION_FILES},
    }
    tokenizer_config = _json_or_none(verifier_dir / "tokenizer_config.json") or {}
    tokenizer_config.pop("chat_template", None)
    tokenizer = {
        **{name: hashes.of(verifier_dir / name) for name in TOKENIZER_FILES if (verifier_dir / name).is_file()},
        "tokenizer_config.json": _stable(tokenizer_config),
    }
    template = {"template": chat_templates(verifier_dir), "kwargs": dict(template_kwargs or {})}
    adapters = {
        "config": _json_or_none(verifier_dir / "adapter_config.json"),
        "weights": sorted(hashes.of(file) for file in verifier_dir.glob("adapter*.safetensors")),
    }
    content: dict[str, object] = {
        "weights": sorted(hashes.of(file) for file in weight_files(verifier_dir)),
        "config": _stable(config),
        "generation_config": _stable(_json_or_none(verifier_dir / "generation_config.json") or {}),
        "tokenizer": tokenizer,
        "chat_template": template,
        "quantisation": quantisation,
        "adapters": adapters,
    }
    hashes.save()
    parts = {part: _digest(content[part]) for part in PARTS}
    return Fingerprint(digest=_digest(parts), parts=parts)


def capture_key(fp: Fingerprint, runtime_key: str, layer_ids: Sequence[int], dtype: str) -> str:
    """sha256 hex of what captured hidden states depend on: verifier, runtime, layers, dtype."""
    return _digest({"verifier": fp.digest, "runtime": runtime_key, "layers": list(layer_ids), "dtype": dtype})


def chat_templates(verifier_dir: Path) -> dict[str, str]:
    """Chat templates by name, from chat_template.jinja, its folder of named ones, or tokenizer_config.json."""
    single = verifier_dir / "chat_template.jinja"
    found: dict[str, str] = {}
    if single.is_file():
        found["default"] = single.read_text(encoding="utf-8")
    for file in sorted((verifier_dir / "additional_chat_templates").glob("*.jinja")):
        found[file.stem] = file.read_text(encoding="utf-8")
    if found:
        return found
    for name in ("chat_template.json", "tokenizer_config.json"):
        stored = (_json_or_none(verifier_dir / name) or {}).get("chat_template")
        if isinstance(stored, str):
            return {"default": stored}
        if isinstance(stored, list):
            return {str(item["name"]): str(item["template"]) for item in stored}
    return {}


class HashCache:
    """sha256 of files, remembered by device, inode, size and both times; a lost or torn cache only costs time."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._known: dict[str, str] = {}
        self._new: dict[str, str] = {}
        if path and path.is_file():
            try:
                self._known = dict(json.loads(path.read_text(encoding="utf-8")))
            except (ValueError, TypeError):
                log.warning("ignoring the unreadable hash cache %s", path)

    def of(self, file: Path) -> str:
        """sha256 of the file's content in hex."""
        stat = file.stat()
        key = f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}"
        if key in self._known:
            return self._known[key]
        digest = sha256_file(file)
        if time.time() - max(stat.st_mtime, stat.st_ctime) > _RACY_SECONDS:
            self._known[key] = self._new[key] = digest
        return digest

    def save(self) -> None:
        """Merge what is new into the file, by rename; concurrent writers may lose an entry, never tear the file."""
        if not self.path or not self._new:
            return
        merged = {**HashCache(self.path)._known, **self._new}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".hash-cache.", suffix=".part", dir=self.path.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump(merged, stream, indent=0, sort_keys=True)
        Path(name).replace(self.path)
        self._new = {}


def _stable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _stable(item) for key, item in value.items() if key not in _VOLATILE}
    return value


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _json_or_none(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise VerifierError(f"{path} is not valid JSON: {error}", mend="copy the verifier again") from error
    return value if isinstance(value, dict) else {"": value}
