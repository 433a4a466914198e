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
_SECRET_VALUES = tuple(
    re.compile(pattern)
    for pattern in (
        # what precedes the host of a URL; a password may hold `@`, and `/` too: digits and `/` are a port and its path
        r"(?P<keep>://)(?:[^/\s:\"'<>]*:(?!\d+/)[^\s\"'<>]+|[^/\s]+)(?=@)",
        r"(?P<keep>(?i:[?&;#](?:[\w-]*(?:token|key|password|secret|signature|credential)|sig|auth)=))[^&\s\"'<>]+",
        # whoever has the address of a webhook may write there: of chats, then as apprise writes them
        r"(?P<keep>\b(?:hooks\.(?:slack|zapier)\.com|discord(?:app)?\.com/api/webhooks|(?:[\w-]+\.)?webhook\.office\.com"
        r"|outlook\.office(?:365)?\.com/webhook|chat\.googleapis\.com/v1)/)[^\s\"'<>]+",
        r"(?P<keep>\bapi\.telegram\.org/bot|https?://[^/\s]+/hooks/)[^\s\"'<>]+",
        r"(?P<keep>\b(?:discord|forms?|gchat|gotifys?|jsons?|mailtos?|matrixs?|mmosts?|msteams|ntfys?|opsgenie|pagerduty"
        r"|pbul|pover|rockets?|signals?|slack|tgram|webex|workflows?|wxteams|xmls?|zulip)://)[^\s\"'<>]+",
        r"(?P<keep>\b(?:Bearer|Basic)\s+)[\w.~+/=-]{8,}",
        r"(?P<keep>X-Amz-(?:Signature|Credential|Security-Token)=)[^&\s]+",
        r"(?P<keep>)\b(?:hf_[A-Za-z0-9]{16,}|sk-[\w-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[0-9A-Z]{16}"
        r"|xox[abpr]-[\w-]{10,})\b",
    )
)
_FLAG = re.compile(r"""(?P<keep>--(?P<name>[\w-]+)(?:[= ]|["'], ?["']))(?:'[^']*'|"[^"]*"|[^\s"']+)""")
"""An option with its value, as a shell has it or as a printed list of arguments."""
_TEXT_KEYS = frozenset({
    "messages", "conversation", "conversations", "prompt", "content", "reasoning_content", "reasoning", "text",
    "reply", "replies", "response", "completion",
})  # fmt: skip
_TEXT_SUFFIXES = frozenset({".md", ".txt", ".log", ".yaml", ".yml", ".csv"})
_JSON_SUFFIXES = frozenset({".json", ".jsonl"})


def is_secret_name(name: str) -> bool:
    """Whether a variable or configuration key of this name holds a secret."""
    return bool(_SECRET_NAME.search(name)) and not name.endswith("_variable")  # that names one, and holds none


def redact(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """Replace known shapes of secrets, and the values of secret environment variables, by a mask."""
    for pattern in _SECRET_VALUES:
        text = pattern.sub(rf"\g<keep>{MASK}", text)
    text = _FLAG.sub(lambda flag: flag["keep"] + MASK if is_secret_name(flag["name"]) else flag[0], text)
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
        return [
            MASK if _takes_secret(before) else scrub(item, allow_text=allow_text, name=name)
            for before, item in zip((None, *value), value, strict=False)
        ]
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


def _takes_secret(argument: Any) -> bool:
    """Whether the next argument of a command line is a secret."""
    flag = re.fullmatch(r"--([\w-]+)", argument) if isinstance(argument, str) else None
    return flag is not None and is_secret_name(flag[1])


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
