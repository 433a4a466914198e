"""The fingerprint of a verifier: a digest of everything that makes a draft stale when it changes.

Built from content only: where the files lie, how they came there and what the directory is called leave no trace, so
a hub snapshot and a local copy of the same bytes agree. Large files are hashed once and remembered by identity.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from speculators_core.errors import VerifierError
from speculators_core.store.files import remember_text
from speculators_core.types import Json, StrictModel
from speculators_core.verifier.facts import parse_object
from speculators_core.verifier.files import LocalFiles, VerifierFiles, open_verifier
from speculators_core.verifier.weights import INDEX, parse_index, read_header, weight_names

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
# Keys of config.json that decide tensor shapes: of the verifier's states, or of a draft made in its image.
SHAPE_KEYS = (
    "hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size",
)  # fmt: skip


class StoredTemplate(NamedTuple):
    """A chat template, and the file that holds it."""

    file: str
    text: str


class _NamedTemplate(TypedDict):
    name: str
    template: str


_STORED_TEMPLATE: TypeAdapter[str | list[_NamedTemplate] | None] = TypeAdapter(str | list[_NamedTemplate] | None)


class Fingerprint(StrictModel):
    """Digest of a verifier, with the digest of each part so that a change can be named."""

    digest: str = Field(description="sha256 over the parts, in hex.")
    parts: dict[str, str] = Field(description="sha256 of each part; the digest of nothing where a part is absent.")

    def changed_parts(self, other: Fingerprint) -> tuple[str, ...]:
        """Names of the parts in which two fingerprints differ, in the order of PARTS."""
        return tuple(part for part in PARTS if self.parts.get(part) != other.parts.get(part))


class Description(StrictModel):
    """What a verifier is, in enough detail to say later what changed: texts and sums, no weights."""

    content: dict[str, Any] = Field(description="part -> exactly what its digest is taken of")
    weights: dict[str, str] = Field(description="weight file -> sha256")

    @property
    def fingerprint(self) -> Fingerprint:
        """Digest of the parts, and of each."""
        parts = {part: _digest(self.content.get(part)) for part in PARTS}
        return Fingerprint(digest=_digest(parts), parts=parts)

    @property
    def shape(self) -> dict[str, Any]:
        """The keys of config.json that decide tensor shapes, as written there (of the text model, where nested)."""
        config = self.content["config"]
        nested = ("text_config", "llm_config", "language_config")
        text: dict[str, Any] = next((config[key] for key in nested if isinstance(config.get(key), dict)), {})
        return {key: value for key in SHAPE_KEYS if (value := text.get(key, config.get(key))) is not None}


def fingerprint(
    verifier_dir: Path, *, home: Path | None, template_kwargs: Mapping[str, Json] | None = None
) -> Fingerprint:
    """Fingerprint a local verifier; as `describe`, which takes every kind of location."""
    return describe(LocalFiles(verifier_dir, home=home), template_kwargs=template_kwargs).fingerprint


def describe_location(
    location: str | Path,
    *,
    revision: str | None = None,
    home: Path | None,
    template_kwargs: Mapping[str, Json] | None = None,
) -> Description:
    """Describe the verifier in a directory, at a URL or on the hub, and remember it under the state root.

    Raises:
        VerifierError: as `open_verifier` and `describe`.
    """
    found = describe(open_verifier(location, revision=revision, home=home), template_kwargs=template_kwargs)
    if home is not None:
        remember(found, home)
    return found


def describe(files: VerifierFiles, *, template_kwargs: Mapping[str, Json] | None = None) -> Description:
    """Read and hash everything that makes a draft stale when it changes.

    Args:
        template_kwargs: keyword arguments for the chat template: they change what the verifier is shown.

    Raises:
        VerifierError: not a model, its weights are missing or torn, or somebody wrote to it meanwhile.
    """
    before = files.stamp()
    names = files.names()
    config = _json(files, "config.json") or {}
    quantisation = {
        "config": config.pop("quantization_config", None) or config.pop("compression_config", None),
        **{name: _json(files, name) for name in _QUANTISATION_FILES},
    }
    tokenizer_config = _json(files, "tokenizer_config.json") or {}
    tokenizer_config.pop("chat_template", None)
    index = parse_index(files.read(INDEX), f"{files.where}/{INDEX}") if INDEX in names else None
    weights = weight_names(names, index, files.where)
    tokenizer = [name for name in TOKENIZER_FILES if name in names]
    adapters = sorted(name for name in names if name.startswith("adapter") and name.endswith(".safetensors"))
    if isinstance(files, LocalFiles):  # elsewhere it would be a request a file
        for name in (*weights, *adapters):
            read_header(files, name)
    wanted = [*weights, *tokenizer, *adapters]
    sums = dict(zip(wanted, files.sha256(wanted), strict=True))
    templates = {name: stored.text for name, stored in templates_of(files).items()}
    content: dict[str, Any] = {
        "weights": sorted(sums[name] for name in weights),
        "config": _stable(config),
        "generation_config": _stable(_json(files, "generation_config.json") or {}),
        "tokenizer": {**{name: sums[name] for name in tokenizer}, "tokenizer_config.json": _stable(tokenizer_config)},
        "chat_template": {"template": templates, "kwargs": dict(template_kwargs or {})},
        "quantisation": quantisation,
        "adapters": {
            "config": _json(files, "adapter_config.json"),
            "weights": sorted(sums[name] for name in adapters),
        },
    }
    if files.stamp() != before:
        raise VerifierError(
            f"{files.where} changed while it was hashed: its fingerprint would be of no verifier at all",
            mend="wait until whoever writes there is done, then run the same command again",
        )
    return Description(content=content, weights={name: sums[name] for name in weights})


def remember(description: Description, home: Path) -> None:
    """Keep a description under its digest, so that a later change can be told line by line."""
    path = _memory(home, description.fingerprint.digest)
    if not path.is_file():
        remember_text(path, description.model_dump_json())


def recall(digest: str, home: Path) -> Description | None:
    """What the verifier of this fingerprint was; None when it was never seen here."""
    path = _memory(home, digest)
    try:
        found = Description.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValidationError, UnicodeDecodeError):
        log.warning("ignoring the unreadable description %s", path)
        return None
    return found if found.fingerprint.digest == digest else None


def capture_key(fp: Fingerprint, runtime_key: str, layer_ids: Sequence[int], dtype: str) -> str:
    """sha256 hex of what captured hidden states depend on: verifier, runtime, layers, dtype."""
    return _digest({"verifier": fp.digest, "runtime": runtime_key, "layers": list(layer_ids), "dtype": dtype})


def chat_templates(verifier_dir: Path) -> dict[str, StoredTemplate]:
    """Chat templates of a local verifier by name; see `templates_of`."""
    return templates_of(LocalFiles(verifier_dir, home=None))


def templates_of(files: VerifierFiles) -> dict[str, StoredTemplate]:
    """Chat templates by name, from chat_template.jinja, its folder of named ones, or tokenizer_config.json.

    Raises:
        VerifierError: not UTF-8, or neither a text nor a list of named ones.
    """
    names = files.names()
    found: dict[str, StoredTemplate] = {}
    if "chat_template.jinja" in names:
        found["default"] = _jinja(files, "chat_template.jinja")
    for name in sorted(name for name in names if name.startswith("additional_chat_templates/")):
        if name.endswith(".jinja"):
            found[Path(name).stem] = _jinja(files, name)
    if found:
        return found
    for name in ("chat_template.json", "tokenizer_config.json"):
        try:
            stored = _STORED_TEMPLATE.validate_python((_json(files, name) or {}).get("chat_template"))
        except ValidationError as error:
            raise VerifierError(
                f"the chat_template of {files.where}/{name} is neither a text nor a list of named ones",
                mend='write it as a text, or as [{"name": …, "template": …}]',
            ) from error
        if isinstance(stored, str):
            return {"default": StoredTemplate(name, stored)}
        if stored is not None:
            return {item["name"]: StoredTemplate(name, item["template"]) for item in stored}
    return {}


def _jinja(files: VerifierFiles, name: str) -> StoredTemplate:
    try:
        return StoredTemplate(name, files.read(name).decode("utf-8"))
    except UnicodeDecodeError as error:
        raise VerifierError(f"{files.where}/{name} is not UTF-8: {error}", mend="save it as UTF-8") from error


def _memory(home: Path, digest: str) -> Path:
    return home / "seen" / f"{digest}.json"


def _stable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _stable(item) for key, item in value.items() if key not in _VOLATILE}
    return value


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _json(files: VerifierFiles, name: str) -> dict[str, Any] | None:
    return parse_object(files.read(name), f"{files.where}/{name}") if name in files.names() else None
