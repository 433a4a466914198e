"""What must not reach MLflow or Prefect: secrets, always; conversation text, unless the recipe allows it."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MASK = "[redacted]"

_SECRET_NAME = re.compile(
    r"(?i:pass(word|wd|phrase)|secret|credential|authorization|(api|access|private|signing)[-_.]?key)"
    r"|(?i:(^|[-_.])(auth|access|api|hf|hub|bearer|session|refresh)[-_.]?token$|^token$)"
    r"|^[A-Z0-9_]+_(TOKEN|KEY)$"
)
_SECRET_VALUES = re.compile(
    r"(?P<keep>://)[^/\s:@]+:[^/\s@]+(?=@)"  # user:password in a URL
    r"|(?P<keep2>\b(?:Bearer|Basic)\s+)[\w.~+/=-]{8,}"
    r"|(?P<keep3>X-Amz-(?:Signature|Credential|Security-Token)=)[^&\s]+"
    r"|\b(?:hf_[A-Za-z0-9]{16,}|sk-[\w-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[0-9A-Z]{16}|xox[abpr]-[\w-]{10,})\b"
)
_TEXT_KEYS = frozenset({
    "messages", "conversation", "conversations", "prompt", "content", "reasoning_content", "reasoning", "text",
    "reply", "replies", "response", "completion",
})  # fmt: skip
_TEXT_SUFFIXES = frozenset({".md", ".txt", ".log", ".yaml", ".yml", ".csv"})
_JSON_SUFFIXES = frozenset({".json", ".jsonl"})


def is_secret_name(name: str) -> bool:
    """Whether a variable or configuration key of this name holds a secret."""
    return bool(_SECRET_NAME.search(name))


def redact(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """Replace known shapes of secrets, and the values of secret environment variables, by a mask."""
    text = _SECRET_VALUES.sub(lambda m: next((k for k in m.groups() if k), "") + MASK, text)
    for name, value in environ.items():
        if len(value) >= 8 and is_secret_name(name) and value in text:
            text = text.replace(value, MASK)
    return text


def scrub(value: Any, *, allow_text: bool, name: str = "") -> Any:
    """A JSON value without secrets; conversation text becomes its length and digest unless it is allowed."""
    if is_secret_name(name) and isinstance(value, str) and value:
        return MASK
    if not allow_text and name in _TEXT_KEYS and isinstance(value, (str, list, tuple)) and _holds_words(value):
        return _stand_in(value)
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {key: scrub(item, allow_text=allow_text, name=str(key)) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [scrub(item, allow_text=allow_text, name=name) for item in value]
    return value


def scrubbed_file(path: Path, *, allow_text: bool) -> bytes | None:
    """The content to upload instead of this file's own; None when it may go as it is (binary kinds)."""
    if path.suffix in _JSON_SUFFIXES:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            return json.dumps(scrub(json.loads(text), allow_text=allow_text), indent=1).encode()
        lines = (json.dumps(scrub(json.loads(line), allow_text=allow_text)) for line in text.splitlines() if line)
        return "".join(f"{line}\n" for line in lines).encode()
    if path.suffix in _TEXT_SUFFIXES:
        return redact(path.read_text(encoding="utf-8", errors="replace")).encode()
    return None


def _holds_words(value: Any) -> bool:
    if isinstance(value, str):
        return bool(value)
    if isinstance(value, Mapping):
        return any(_holds_words(item) for item in value.values())
    return isinstance(value, Sequence) and any(_holds_words(item) for item in value)


def _stand_in(value: Any) -> dict[str, Any]:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return {"withheld": "conversation text", "characters": len(text), "sha256": digest}
