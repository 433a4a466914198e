"""Records in this process's memory: the reference backend, for tests.

Configuration: `space` (text), which writers and readers of one process share by name.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hs_connectors.contract import Entry, Payload, check_key
from hs_connectors.errors import CaptureFailed, RecordTimeout, SettingsError


@dataclass
class _Space:
    changed: threading.Condition = field(default_factory=threading.Condition)
    payloads: dict[str, bytes] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)
    facts: str | None = None


_SPACES: dict[str, _Space] = {}
_SPACES_LOCK = threading.Lock()


class MemoryBackend:
    """Keeps payloads in a dictionary of the process."""

    name = "memory"

    def __init__(self, config: Mapping[str, Any]) -> None:
        if set(config) != {"space"} or not isinstance(config["space"], str):
            raise SettingsError(f"the memory backend takes one option, space (text), got {dict(config)!r}")
        with _SPACES_LOCK:
            self._space = _SPACES.setdefault(config["space"], _Space())

    def prepare(self) -> None:
        """Nothing to make ready."""

    def publish(self, key: str, *pieces: Payload) -> None:
        """Keep a copy of the payload."""
        with self._space.changed:
            self._space.payloads[check_key(key)] = b"".join(pieces)
            self._space.times[key] = time.time()
            self._space.changed.notify_all()

    def fail(self, key: str, message: str) -> None:
        """Keep the message."""
        with self._space.changed:
            self._space.errors[check_key(key)] = message
            self._space.times[key] = time.time()
            self._space.changed.notify_all()

    def fetch(self, key: str, timeout_s: float) -> Payload:
        """Wait for a payload or an error."""
        space = self._space
        with space.changed:
            arrived = space.changed.wait_for(lambda: key in space.payloads or key in space.errors, max(timeout_s, 0))
            if key in space.payloads:
                return space.payloads[key]
            if arrived:
                raise CaptureFailed(f"record {key}: {space.errors[key]}")
        raise RecordTimeout(f"record {check_key(key)} did not appear within {timeout_s:g} s")

    def discard(self, key: str) -> None:
        """Forget payload and error."""
        with self._space.changed:
            self._space.payloads.pop(check_key(key), None)
            self._space.errors.pop(key, None)
            self._space.times.pop(key, None)

    def entries(self) -> Iterator[Entry]:
        """What is kept just now."""
        with self._space.changed:
            space = self._space
            found = [Entry(key, "record", len(payload), space.times[key]) for key, payload in space.payloads.items()]
            found += [Entry(key, "error", 0, space.times[key]) for key in space.errors if key not in space.payloads]
        return iter(found)

    def announce(self, facts: Mapping[str, Any]) -> None:
        """Keep the facts."""
        with self._space.changed:
            self._space.facts = json.dumps(facts)

    def announcement(self) -> dict[str, Any] | None:
        """The facts kept last."""
        with self._space.changed:
            return None if self._space.facts is None else json.loads(self._space.facts)
