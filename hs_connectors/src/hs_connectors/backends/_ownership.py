"""Whose a file or object is: a store may share its directory or bucket with weights and notes of other people."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Literal

from hs_connectors.errors import EntryError

OWN_PLACE = "name a directory of its own as the store's root"
_FIRST_LOOK = 4096
"""Bytes that hold the whole header of nearly every record."""
_HEADER_LIMIT = 100_000_000
"""Bytes of a safetensors header: the format's own limit."""


def kind_of(read: Callable[[int], bytes]) -> Literal["record", "foreign", "unreadable"]:
    """What its header says; `read` gives its first n bytes, or all where it has fewer.

    record: one of ours, of whatever version · foreign: safetensors of another kind · unreadable: no safetensors.
    """
    from hs_connectors.record import SCHEMA

    head = read(_FIRST_LOOK)
    end = 8 + int.from_bytes(head[:8], "little")
    if end > 8 + _HEADER_LIMIT:
        return "unreadable"
    if end > len(head):
        head = read(end)
    try:
        header = json.loads(head[8:end])
    except (ValueError, RecursionError):
        return "unreadable"
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    schema = metadata.get("schema") if isinstance(metadata, dict) else None
    return "record" if str(schema).startswith(SCHEMA.partition("/")[0]) else "foreign"


def refuse_foreign(where: str, read: Callable[[int], bytes]) -> None:
    """EntryError for weights of anybody's that bear the name of a record; what cannot be read is nobody's weights."""
    if kind_of(read) == "foreign":
        raise EntryError(
            f"{where} holds tensors, but no record: it is not deleted",
            mend=OWN_PLACE,
        )


def error_of(marker: bytes) -> str | None:
    """What an error marker says; None where it is somebody else's."""
    try:
        facts = json.loads(marker)
    except (ValueError, RecursionError):
        return None
    text = facts["error"] if isinstance(facts, dict) and set(facts) == {"error"} else None
    return text if isinstance(text, str) else None
