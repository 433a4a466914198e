"""Retention: what the store keeps, why, and what may go. Nothing here deletes; the plan is shown first.

Marked, and never swept: what registered versions refer to; what is pinned; what somebody uses or makes just now; and
what was made before its lineage was recorded, since nobody can tell what refers to it. A version under an alias keeps
its whole lineage (it may be the warm start of the next draft), any other version its draft and evaluation. The rest is
swept when it was not used for `keep_days`, and, least recently used first, while the store is above its quota.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from pydantic import Field

from speculators_core.types import StrictModel

DAY_S = 86_400.0
GRACE_S = 3600.0
"""Nothing that was used within the last hour is swept for the quota's sake: a stage may be about to use it."""


class Item(StrictModel):
    """One artifact, or one workspace that a killed stage left."""

    name: str = Field(description="kind/input digest; a workspace's begins with `work/`")
    digest: str = Field(description="digest of its content; a workspace has none and gives its name")
    num_bytes: int
    used: float = Field(description="when it was last used, seconds since 1970")
    inputs: tuple[str, ...] | None = Field(description="digests of what it was made of; None: not recorded")


class Root(StrictModel):
    """Something that must stay, and why; with `lineage` also everything that it was made of."""

    digest: str
    reason: str
    lineage: bool = False


class Line(StrictModel):
    """What becomes of one item."""

    name: str
    digest: str
    num_bytes: int
    idle_days: float
    fate: Literal["keep", "delete"]
    reason: str


class Plan(StrictModel):
    """What a sweep would do; `over_quota`: bytes that remain above the quota because they are referenced or new."""

    lines: tuple[Line, ...]
    kept_bytes: int
    freed_bytes: int
    over_quota: int = 0

    @property
    def deletions(self) -> tuple[Line, ...]:
        """What would go."""
        return tuple(line for line in self.lines if line.fate == "delete")


def mark(items: Sequence[Item], roots: Iterable[Root]) -> dict[str, str]:
    """Digest → reason of everything that roots hold, directly or through the lineage of one that holds its own."""
    by_digest = {item.digest: item for item in items}
    marked: dict[str, str] = {}
    open_ends = []
    for root in roots:
        marked.setdefault(root.digest, root.reason)
        if root.lineage:
            open_ends.append((root.digest, root.reason))
    seen: set[str] = set()
    while open_ends:
        digest, reason = open_ends.pop()
        if digest in seen or digest not in by_digest:
            continue
        seen.add(digest)
        for used in by_digest[digest].inputs or ():
            marked.setdefault(used, reason)
            open_ends.append((used, reason))
    return marked


def plan_sweep(
    items: Sequence[Item], roots: Iterable[Root], *, now: float, keep_days: float, quota_bytes: int | None = None
) -> Plan:
    """Decide the fate of every item.

    Args:
        now: seconds since 1970; an item that was used after it (clocks may be skewed) counts as used now.
        keep_days: what was not used for longer goes, unless it is marked.
        quota_bytes: above it, unmarked items go though they are younger, least recently used first.
    """
    marked = mark(items, roots)
    fates: dict[str, tuple[Literal["keep", "delete"], str]] = {}
    for item in items:
        idle = max(0.0, now - item.used) / DAY_S
        if item.digest in marked:
            fates[item.name] = "keep", marked[item.digest]
        elif item.inputs is None:
            fates[item.name] = "keep", "made before lineage was recorded: what refers to it is unknown"
        elif idle > keep_days:
            fates[item.name] = "delete", f"nothing refers to it, and it was not used for {idle:.0f} days"
        else:
            fates[item.name] = "keep", f"used within {keep_days:g} days"
    kept = sum(item.num_bytes for item in items if fates[item.name][0] == "keep")
    if quota_bytes is not None:
        for item in sorted(items, key=lambda item: item.used):
            spare = fates[item.name][0] == "keep" and item.digest not in marked and item.inputs is not None
            if kept > quota_bytes and spare and now - item.used > GRACE_S:
                fates[item.name] = "delete", "nothing refers to it, and the store is above its quota"
                kept -= item.num_bytes
    return Plan(
        lines=_lines(items, fates, now),
        kept_bytes=kept,
        freed_bytes=sum(item.num_bytes for item in items) - kept,
        over_quota=max(0, kept - quota_bytes) if quota_bytes is not None else 0,
    )


def _lines(
    items: Sequence[Item], fates: Mapping[str, tuple[Literal["keep", "delete"], str]], now: float
) -> tuple[Line, ...]:
    return tuple(
        Line(
            name=item.name,
            digest=item.digest,
            num_bytes=item.num_bytes,
            idle_days=round(max(0.0, now - item.used) / DAY_S, 2),
            fate=fates[item.name][0],
            reason=fates[item.name][1],
        )
        for item in sorted(items, key=lambda item: item.name)
    )
