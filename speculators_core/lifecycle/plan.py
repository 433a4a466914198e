"""A plan: what would be done, why, how long it takes and what it costs; and whether the world is still the planned one.

Nothing here reads a registry, and only `recorded` a store: the facts are handed in. Rates are those of earlier runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from pydantic import Field

from speculators_core.lifecycle.budget import Amount
from speculators_core.lifecycle.changes import Action, Change
from speculators_core.store import Store
from speculators_core.types import StrictModel
from speculators_core.verifier.difference import PartChange
from speculators_core.verifier.fingerprint import PARTS

FORMAT = 1
MADE_OF = "made_of"
"""Key of a manifest's meta under which `MadeOf` is kept."""
RELEASE = "register and promote"
"""Name of a plan's last step, which is quick and never timed."""
StageState = Literal["cached", "skipped", "run", "if needed"]


class PlannedStage(StrictModel):
    """One step of a plan. Numbers are null where nothing was measured yet that they could be told from."""

    name: str
    state: StageState = Field(
        description="cached: found in the store · skipped: the recipe does without · if needed: when the gate fails "
        "what serves"
    )
    why: str
    tokens: int | None = Field(None, description="tokens that it reads or writes")
    num_bytes: int | None = Field(None, description="bytes of hidden states that it stores")
    seconds: float | None = Field(None, description="from the rates of earlier runs")
    cost: float | None = Field(None, description="seconds at the recipe's price")

    @property
    def done(self) -> bool:
        """Whether nothing is to be done for it."""
        return self.state in ("cached", "skipped")

    @property
    def untimed(self) -> bool:
        """Whether it will take time that nothing measured can tell."""
        return not self.done and self.seconds is None and self.name != RELEASE

    @property
    def amount(self) -> Amount:
        """Its numbers for sums, in which the unknown counts as nothing."""
        likely = Estimate(self.tokens, self.num_bytes, self.seconds)
        return likely.amount.model_copy(update={"cost": self.cost or 0.0})


class Facts(StrictModel):
    """What a plan was made for; `apply` holds the world against it."""

    verifier: str = Field(description="fingerprint")
    parts: dict[str, str] = Field(description="digest of each part of it")
    runtime: str = Field(description="runtime.key")
    vllm: str = Field(description="version behind it")
    sources: str = Field(description="digest of the data sources' contents")
    champion: str | None = Field(description="version that serves")


class Plan(StrictModel):
    """What `plan` prints and writes, and `apply` carries out."""

    format: int = FORMAT
    recipe: dict[str, Any] = Field(description="the recipe with its overrides")
    deployment: str
    facts: Facts
    action: Action
    changes: tuple[Change, ...]
    reasons: tuple[str, ...] = Field(description="why this action")
    details: tuple[PartChange, ...] = Field(description="what changed in each part, as far as it was remembered")
    warm_start: str | None = Field(description="version whose weights training starts from")
    stages: tuple[PlannedStage, ...]
    notes: tuple[str, ...] = ()

    @property
    def to_run(self) -> tuple[PlannedStage, ...]:
        """Stages that are not done already."""
        return tuple(stage for stage in self.stages if not stage.done)


def total(stages: Iterable[PlannedStage], field: Literal["tokens", "num_bytes", "seconds", "cost"]) -> float | None:
    """Sum of what is known; None where nothing is."""
    known = [value for stage in stages if (value := getattr(stage, field)) is not None]
    return float(sum(known)) if known else None


def moved(then: Facts, now: Facts) -> tuple[str, ...]:
    """What differs between two worlds, one sentence each; empty where nothing does."""
    found = []
    if then.verifier != now.verifier:
        parts = [part for part in PARTS if then.parts.get(part) != now.parts.get(part)]
        found.append(f"the verifier changed ({', '.join(parts)})")
    if then.runtime != now.runtime:
        versions = f"vLLM {then.vllm} → {now.vllm}" if then.vllm != now.vllm else "another build, device or runner"
        found.append(f"the runtime changed ({versions})")
    if then.sources != now.sources:
        found.append("the data sources changed")
    if then.champion != now.champion:
        found.append(f"the champion was version {then.champion or 'none'} and is {now.champion or 'none'}")
    return tuple(found)


class MadeOf(StrictModel):
    """What decided an artifact's key, by name, so that a later miss can say what changed; and what it took."""

    stage: str
    inputs: dict[str, str] = Field(description="digests of what went in")
    settings: dict[str, Any] = Field(description="the recipe's values and package versions in the key")
    seconds: float | None = Field(None, description="wall-clock time of the attempt that finished it")
    finished: float | None = Field(None, description="when that was, in seconds since 1970")


class Estimate(NamedTuple):
    """What a stage will take; None for what nothing measured can tell."""

    tokens: int | None = None
    num_bytes: int | None = None
    seconds: float | None = None

    @property
    def amount(self) -> Amount:
        """The same for sums, in which the unknown counts as nothing."""
        return Amount(seconds=self.seconds or 0.0, tokens=self.tokens or 0, num_bytes=self.num_bytes or 0)


class Recorded(StrictModel):
    """What an artifact of the store says it was made of, and what it took."""

    kind: str
    inputs: dict[str, str] | None = Field(description="digests by name; None: made before they were kept")
    settings: dict[str, Any] = Field(description="further values of its key")
    seconds: float | None
    finished: float = Field(description="seconds since 1970; 0 where unknown")
    meta: dict[str, Any] = Field(description="its stage's summary")


def recorded(store: Store) -> Iterator[Recorded]:
    """What each artifact of a store says of itself."""
    for ref in store.artifacts():
        meta = dict(store.manifest(ref).meta)
        kept = meta.pop(MADE_OF, None)
        made = None if kept is None else MadeOf.model_validate(kept)
        yield Recorded(
            kind=ref.kind,
            inputs=None if made is None else made.inputs,
            settings={} if made is None else made.settings,
            seconds=None if made is None else made.seconds,
            finished=(made.finished or 0.0) if made else 0.0,
            meta=meta,
        )


def why_missing(inputs: Mapping[str, str], settings: Mapping[str, Any], earlier: Sequence[Recorded]) -> str:
    """Why no artifact fits: the names of what differs from the nearest earlier one of its kind.

    Args:
        inputs, settings: what the missing artifact would be made of.
        earlier: artifacts of its kind.
    """
    if not earlier:
        return "was never run here"
    wanted = leaves({**inputs, **settings})
    known = [(leaves({**item.inputs, **item.settings}), item) for item in earlier if item.inputs is not None]
    if not known:
        return "the earlier ones do not say what they were made of"

    def differing(found: Mapping[str, Any]) -> list[str]:
        return sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))

    found, _ = min(known, key=lambda pair: (len(differing(pair[0])), -pair[1].finished))
    names = differing(found)
    if len(names) > 1 and "capture" in names:
        names.remove("capture")  # a digest of other things that are named
    told = ", ".join(f"{name} {_shown(found.get(name))} → {_shown(wanted.get(name))}" for name in names[:4])
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"changed: {told}{more}" if names else "the stage's own code changed, or its artifact is damaged"


def leaves(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values of nested mappings by dotted name; lists stay whole."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= leaves(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    text = value if isinstance(value, str) else json.dumps(value)
    return text[:12] if len(text) == 64 else text[:40]


class Rates:
    """Seconds of each stage from what earlier runs of this state root took, the newest first."""

    def __init__(self, recorded: Iterable[Recorded]) -> None:
        self._newest: dict[str, Recorded] = {}
        for item in sorted(recorded, key=lambda item: item.finished):
            self._newest[item.kind] = item

    def of_tokens(self, kind: str, tokens: float | None) -> float | None:
        """Seconds for so many tokens at the newest artifact's tokens a second."""
        item = self._newest.get(kind)
        if item is None or tokens is None:
            return None
        seconds, done = item.meta.get("seconds") or item.seconds, item.meta.get("tokens")
        return round(tokens * seconds / done, 1) if seconds and done else None

    def whole(self, kind: str) -> float | None:
        """Seconds that the newest artifact of this kind took, whatever its size."""
        item = self._newest.get(kind)
        seconds = None if item is None else item.seconds or item.meta.get("seconds")
        return None if seconds is None else round(float(seconds), 1)

    def meta(self, kind: str, name: str) -> Any:
        """A value of the newest artifact's summary."""
        item = self._newest.get(kind)
        return None if item is None else item.meta.get(name)
