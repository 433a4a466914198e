"""The compatibility matrix: draft version × verifier × runtime, each cell proven, failed or untested.

A cell is what the gate said of one registered draft on one pair of verifier and runtime. Cells are kept as tags of the
version that they speak of, so that they live and die with it, and any reader of the registry sees them. Each pair that
a version was measured on has a cell of its own: its registered pair, and others that it was tested on later.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from pydantic import Field, ValidationError

from speculators_core.engine.runtime import UNTESTED
from speculators_core.types import StrictModel

FINGERPRINT_TAG = "verifier.fingerprint"
RUNTIME_TAG = "runtime.key"
GATE_TAG = "gate.outcome"
CELL_PREFIX = "cell."

State = Literal["proven", "failed", "untested"]
_STATES: dict[str | None, State] = {"pass": "proven", "fail": "failed"}


class Pair(StrictModel):
    """A verifier and the runtime that serves it; names are for readers, digests decide."""

    verifier_fingerprint: str = Field(description="`verifier.fingerprint`")
    runtime_key: str = Field(description="`runtime.key`")
    verifier: str | None = Field(None, description="the verifier's name")
    vllm: str | None = Field(None, description="version of vLLM")

    @property
    def key(self) -> tuple[str, str]:
        """What makes two pairs the same."""
        return self.verifier_fingerprint, self.runtime_key


class Cell(StrictModel):
    """What is known of one draft on one pair. `outcome` is the gate's; inconclusive proves nothing."""

    pair: Pair
    outcome: str | None
    al: float | None = None
    prompts: int | None = None
    evaluation: str | None = Field(None, description="digest of the evaluation behind it")

    @property
    def state(self) -> State:
        """proven, failed or untested; of a server that does not say what it is, no outcome proves anything."""
        if self.pair.runtime_key.startswith(UNTESTED):
            return "untested"
        return _STATES.get(self.outcome, "untested")

    @property
    def tag(self) -> str:
        """Name of the tag that keeps it."""
        return f"{CELL_PREFIX}{self.pair.verifier_fingerprint[:16]}.{self.pair.runtime_key[:16]}"


def cells(tags: Mapping[str, str]) -> tuple[Cell, ...]:
    """Every cell of a version, from its tags; its registered pair first.

    The pair's own tag decides; without one the version's gate outcome stands for its registered pair. An unreadable
    tag is no cell: what cannot be read was not tested.
    """
    found: dict[tuple[str, str], Cell] = {}
    fingerprint, runtime = tags.get(FINGERPRINT_TAG), tags.get(RUNTIME_TAG)
    if fingerprint and runtime:
        pair = Pair(
            verifier_fingerprint=fingerprint,
            runtime_key=runtime,
            verifier=tags.get("verifier.name"),
            vllm=tags.get("vllm.version"),
        )
        found[pair.key] = Cell(pair=pair, outcome=tags.get(GATE_TAG), al=number_of(tags.get("al")))
    for name in sorted(tags):
        if not name.startswith(CELL_PREFIX):
            continue
        try:
            cell = Cell.model_validate_json(tags[name])
        except ValidationError:
            continue
        if cell.tag == name:  # a tag that was copied to another name speaks of nothing
            found[cell.pair.key] = cell
    return tuple(found.values())


def number_of(tag: str | None) -> float | None:
    """A tag's number; None where there is no tag, or where it holds no finite number: anybody may edit tags."""
    try:
        number = float(tag or "")
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def cell_of(tags: Mapping[str, str], *, verifier_fingerprint: str, runtime_key: str) -> Cell:
    """The cell of a version on a pair; an untested one where nothing is known."""
    for cell in cells(tags):
        if cell.pair.key == (verifier_fingerprint, runtime_key):
            return cell
    return Cell(pair=Pair(verifier_fingerprint=verifier_fingerprint, runtime_key=runtime_key), outcome=None)


class Row(StrictModel):
    """A version's cells, one for each pair of the matrix, in its order."""

    version: str
    draft: str = Field(description="digest of the draft's bytes")
    aliases: tuple[str, ...]
    cells: tuple[Cell, ...]


class Matrix(StrictModel):
    """All versions of a model against all pairs that any of them was measured on."""

    model: str
    pairs: tuple[Pair, ...]
    rows: tuple[Row, ...]


def build_matrix(model: str, versions: Mapping[str, Mapping[str, str]], aliases: Mapping[str, str]) -> Matrix:
    """Lay the cells of all versions side by side; pairs in the order in which they were first registered.

    Args:
        versions: number → tags, oldest first.
        aliases: alias → number.
    """
    pairs: dict[tuple[str, str], Pair] = {}
    for tags in versions.values():
        for cell in cells(tags):
            pairs.setdefault(cell.pair.key, cell.pair)
    rows = tuple(
        Row(
            version=version,
            draft=tags.get("draft.digest", ""),
            aliases=tuple(sorted(name for name, number in aliases.items() if number == version)),
            cells=tuple(
                cell_of(tags, verifier_fingerprint=pair.verifier_fingerprint, runtime_key=pair.runtime_key)
                for pair in pairs.values()
            ),
        )
        for version, tags in versions.items()
    )
    return Matrix(model=model, pairs=tuple(pairs.values()), rows=rows)
