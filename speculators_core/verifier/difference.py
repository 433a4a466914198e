"""What differs between two verifiers: which parts, and in each which keys, lines, files or tensors."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field

from speculators_core.types import StrictModel
from speculators_core.verifier.files import VerifierFiles
from speculators_core.verifier.fingerprint import Description
from speculators_core.verifier.weights import StoredTensor, read_header

_ABSENT = object()
_BLOCK = 16 << 20
_LONGEST = 100  # characters of a value that are shown


class PartChange(StrictModel):
    """One part of the fingerprint that changed."""

    part: str
    lines: tuple[str, ...] = Field(description="`key: before → after`, or lines of a unified diff for templates")


class TensorChanges(StrictModel):
    """Tensors that differ, by name."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    reshaped: tuple[str, ...] = Field((), description="another shape or dtype")
    changed: tuple[str, ...] = Field((), description="other values")
    same: int = Field(description="tensors that are equal, or lie in files that are")
    values_compared: bool = Field(description="False where that would have meant downloading the weights")


def difference(before: Description, after: Description) -> tuple[PartChange, ...]:
    """The changed parts in the order of PARTS, with what changed in each."""
    old, new = before.fingerprint, after.fingerprint
    return tuple(
        PartChange(part=part, lines=tuple(_part_lines(part, before, after))) for part in new.changed_parts(old)
    )


def _part_lines(part: str, before: Description, after: Description) -> Iterator[str]:
    if part == "weights":
        yield from _weight_lines(before.weights, after.weights)
    else:
        yield from _walk(before.content.get(part), after.content.get(part), "")


def _weight_lines(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            yield f"{name}: {_sum(before.get(name))} → {_sum(after.get(name))}"


def _sum(digest: str | None) -> str:
    return "absent" if digest is None else f"sha256 {digest[:12]}"


def _walk(before: Any, after: Any, path: str) -> Iterator[str]:
    """Leaves that differ, by dotted path; templates line by line."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys(), key=str):
            yield from _walk(before.get(key, _ABSENT), after.get(key, _ABSENT), f"{path}.{key}" if path else str(key))
    elif before != after:
        if isinstance(before, str) and isinstance(after, str) and "\n" in before + after:
            lines = difflib.unified_diff(before.splitlines(), after.splitlines(), "before", "after", n=0, lineterm="")
            yield from (line for line in lines if not line.startswith(("---", "+++")))
        else:
            yield f"{path or 'value'}: {_shown(before)} → {_shown(after)}"


def _shown(value: Any) -> str:
    if value is _ABSENT:
        return "absent"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(text)} characters)"


def tensor_changes(
    before: VerifierFiles, old: Description, after: VerifierFiles, new: Description, *, values: bool
) -> TensorChanges:
    """Compare weights tensor by tensor; files with equal sums are not read beyond their headers.

    Args:
        values: also compare the bytes of tensors in files that differ (False: names, shapes and dtypes alone).

    Raises:
        VerifierError: a file is not safetensors, or cannot be read.
    """
    ours, theirs = _tensors(before, old), _tensors(after, new)
    shared = ours.keys() & theirs.keys()
    reshaped = {name for name in shared if ours[name].kind != theirs[name].kind}
    suspects = sorted(
        name for name in shared - reshaped if old.weights[ours[name].file] != new.weights[theirs[name].file]
    )
    changed = [name for name in suspects if values and not _equal(before, ours[name], after, theirs[name])]
    return TensorChanges(
        added=tuple(sorted(theirs.keys() - ours.keys())),
        removed=tuple(sorted(ours.keys() - theirs.keys())),
        reshaped=tuple(sorted(reshaped)),
        changed=tuple(changed),
        same=len(shared) - len(reshaped) - (len(changed) if values else len(suspects)),
        values_compared=values,
    )


def _tensors(files: VerifierFiles, description: Description) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    for file in description.weights:
        found |= read_header(files, file)
    return found


def _equal(before: VerifierFiles, ours: StoredTensor, after: VerifierFiles, theirs: StoredTensor) -> bool:
    for offset in range(0, ours.length, _BLOCK):
        length = min(_BLOCK, ours.length - offset)
        one = before.read_range(ours.file, ours.start + offset, length)
        if one != after.read_range(theirs.file, theirs.start + offset, length):
            return False
    return True
