"""What a supervisor tells while it serves: one JSON object a line, in the order in which it happened."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from speculators_core.types import StrictModel

Kind = Literal[
    "starting",
    "ready",
    "rolling",
    "rolled",
    "proven",
    "refused",
    "rolled_back",
    "registry_away",
    "registry_back",
    "engine_died",
    "restarted",
    "speculation_doubtful",
    "speculation_off",
    "speculation_on",
    "stopping",
    "stopped",
]
"""starting: an engine is being started for the first version · ready: the first version takes traffic at `address` ·
rolling: the alias moved, its version is being started · rolled: it takes the traffic (`seconds` without an engine where
the machine holds one only) · proven: its window of observation ended well · refused: it was not let in, what served
goes on · rolled_back: it took traffic, or failed the probe, and the version `version` serves again · registry_away,
registry_back: nothing can be followed meanwhile · engine_died, restarted · speculation_doubtful: it seems to cost more
than it gives · speculation_off, speculation_on: the verifier answers alone, or with its draft again · stopping: no new
requests, those in flight end · stopped."""


class ServeEvent(StrictModel):
    """One event of one supervisor."""

    time: float = Field(default_factory=time.time, description="seconds since 1970")
    event: Kind
    model: str = Field(description="registered model that is served")
    version: str | None = Field(None, description="the version that it is about")
    reason: str = Field("", description="why, as a sentence")
    address: str | None = Field(None, description="base URL for clients; of `ready`")
    seconds: float | None = Field(None, description="how long it took, or how long nothing answered")


EventSink = Callable[[ServeEvent], None]


def append_event(path: Path, event: ServeEvent) -> None:
    """Add a line to a file of events."""
    with path.open("ab") as file:
        file.write(event.model_dump_json(exclude_none=True).encode() + b"\n")


def read_events(path: Path) -> list[ServeEvent]:
    """Every whole line of a file of events; empty where there is no file yet."""
    if not path.exists():
        return []
    events = []
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            events.append(ServeEvent.model_validate_json(line))
        except ValidationError:
            continue  # torn by a kill
    return events
