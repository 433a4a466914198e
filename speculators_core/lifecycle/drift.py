"""Drift of traffic: whether what serves accepts fewer tokens on real requests than it was registered with.

Whoever watches an engine writes one `ServedWindow` a line to `<home>/served/<model>.jsonl` (`note_window`): what the
engine counted between two looks at its counters. `judge` compares the acceptance length (AL) of the newest windows with
the registered one, by intervals; `follow` makes of a row of such verdicts one incident until it is over.
Whoever judges keeps the incident in `<home>/served/<model>.incident.json` (`note_incident`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from speculators_core.store import write_atomic
from speculators_core.types import StrictModel

_TAIL_BYTES = 2 << 20
"""Of a file of windows as much is read: some thousands of lines, far more than any `DriftConfig.minutes` asks for."""
_MAX_BYTES = 8 << 20
_UNITS = 60
"""Neighbouring windows are put together until so many are left: what is resampled should be nearly independent."""


class DriftConfig(StrictModel):
    """When served acceptance counts as fallen."""

    margin: float = Field(
        0.10, ge=0, lt=1, description="tolerated relative loss: traffic is never quite like the prompts of the gate"
    )
    minutes: float = Field(240, gt=0, description="how far back windows count")
    min_drafts: int = Field(2000, ge=1, description="fewer drafting steps tell nothing")
    min_windows: int = Field(10, ge=2, description="fewer windows tell nothing: the interval is resampled over them")
    confidence: float = Field(0.99, gt=0.5, lt=1, description="of the two-sided interval of the served AL")


class ServedWindow(StrictModel):
    """What one engine counted in a span of time while it served one version; a line of the file."""

    version: str
    start: float = Field(description="seconds since 1970")
    end: float = Field(description="seconds since 1970")
    drafts: int = Field(ge=0, description="drafting steps")
    accepted: int = Field(ge=0, description="drafted tokens that were accepted")


class CounterReading(StrictModel):
    """An engine's running totals at a moment, and the version that it served then."""

    version: str
    time: float = Field(description="seconds since 1970")
    drafts: int = Field(ge=0)
    accepted: int = Field(ge=0)


class Registered(StrictModel):
    """The AL that a version was registered with."""

    al: float
    al_low: float | None = Field(None, description="lower end of its interval; None: not recorded")


class DriftVerdict(StrictModel):
    """drifted: the whole interval is below the limit · steady: the AL reaches it · unclear: what is left."""

    state: Literal["drifted", "steady", "unclear"]
    limit: float = Field(description="least AL that is not a fall: (1 - margin) × the registered one's lower end")
    al: float | None = Field(None, description="served; None where too little was drafted")
    interval: tuple[float, float] | None = None
    drafts: int = 0
    reason: str


class Incident(StrictModel):
    """A fall of served AL that is not over yet."""

    version: str
    since: float = Field(description="seconds since 1970; with the version it names the incident")
    reason: str


def window_between(before: CounterReading | None, after: CounterReading) -> ServedWindow | None:
    """What an engine counted between two readings; None where nothing can be told from them.

    Totals that fell are those of an engine that was started anew in between.
    """
    if before is None or before.version != after.version or after.time <= before.time:
        return None
    anew = after.drafts < before.drafts or after.accepted < before.accepted
    drafts, accepted = (0, 0) if anew else (before.drafts, before.accepted)
    return ServedWindow(
        version=after.version,
        start=before.time,
        end=after.time,
        drafts=after.drafts - drafts,
        accepted=after.accepted - accepted,
    )


def judge(
    windows: Sequence[ServedWindow], registered: Registered, version: str, *, now: float, config: DriftConfig
) -> DriftVerdict:
    """Hold the newest windows of a version against the AL that it was registered with."""
    from speculators_core.evaluation.statistics import ratio_interval

    limit = (1 - config.margin) * (registered.al if registered.al_low is None else registered.al_low)
    since = now - 60 * config.minutes
    counted = [window for window in windows if window.version == version and window.end >= since and window.drafts > 0]
    drafts = sum(window.drafts for window in counted)
    if drafts < config.min_drafts or len(counted) < config.min_windows:
        reason = f"{drafts} drafts in {len(counted)} windows of the last {config.minutes:g} min are too few to tell"
        return DriftVerdict(state="unclear", limit=limit, drafts=drafts, reason=reason)
    counts = list(_merged(counted))
    found = ratio_interval(*zip(*counts, strict=True), confidence=config.confidence, resamples=2000, seed=0)
    al = 1 + sum(accepted for _, accepted in counts) / drafts
    state: Literal["drifted", "steady", "unclear"] = (
        "drifted" if found.high < limit else "steady" if al >= limit else "unclear"
    )
    reason = (
        f"served acceptance length {al:.3f} ({100 * config.confidence:g} % interval {found.low:.3f} to "
        f"{found.high:.3f}, {drafts:,} drafts) against {registered.al:.3f} registered; a fall begins below {limit:.3f}"
    )
    return DriftVerdict(state=state, limit=limit, al=al, interval=(found.low, found.high), drafts=drafts, reason=reason)


def follow(open_incident: Incident | None, verdict: DriftVerdict, version: str, *, now: float) -> Incident | None:
    """The incident that goes on, begins, or is over (None); too little traffic neither begins nor ends one."""
    if open_incident is not None and open_incident.version != version:
        open_incident = None  # another version serves by now
    if verdict.state == "drifted":
        return open_incident or Incident(version=version, since=now, reason=verdict.reason)
    return None if verdict.state == "steady" else open_incident


def note_window(home: Path, model: str, window: ServedWindow) -> None:
    """Append a window to the model's file; a file that has grown large keeps its newer half."""
    path = windows_path(home, model)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(window.model_dump_json().encode() + b"\n")
    if path.stat().st_size > _MAX_BYTES:
        kept = path.read_bytes()[-_MAX_BYTES // 2 :].split(b"\n", 1)[1]
        write_atomic(path, lambda part: part.write_bytes(kept))


def read_windows(home: Path, model: str) -> tuple[ServedWindow, ...]:
    """The newest windows of a model, oldest first; torn lines are left out. Empty where nothing was noted."""
    path = windows_path(home, model)
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return ()
    return tuple(window for line in lines if (window := _window(line)) is not None)


def read_incident(home: Path, model: str, version: str | None) -> Incident | None:
    """The open incident of the version that serves, if there is one."""
    try:
        found = Incident.model_validate_json(_incident_path(home, model).read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
    return found if found.version == version else None


def note_incident(home: Path, model: str, incident: Incident | None) -> None:
    """Keep what `follow` says: an incident that is open, or that none is."""
    path = _incident_path(home, model)
    if incident is None:
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, lambda part: part.write_text(incident.model_dump_json()))


def windows_path(home: Path, model: str) -> Path:
    """Where the windows of a registered model lie."""
    return home / "served" / f"{model}.jsonl"


def _incident_path(home: Path, model: str) -> Path:
    return home / "served" / f"{model}.incident.json"


def _window(line: bytes) -> ServedWindow | None:
    try:
        return ServedWindow.model_validate_json(line)
    except ValidationError:
        return None


def _merged(windows: Sequence[ServedWindow]) -> Iterator[tuple[int, int]]:
    """(drafts, accepted) of at most _UNITS runs of neighbouring windows."""
    ordered = sorted(windows, key=lambda window: window.start)
    size = -(-len(ordered) // _UNITS)
    for start in range(0, len(ordered), size):
        together = ordered[start : start + size]
        yield sum(window.drafts for window in together), sum(window.accepted for window in together)
