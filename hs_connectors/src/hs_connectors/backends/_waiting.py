"""What backends share that must look again and again until something is there."""

from __future__ import annotations

import time
from collections.abc import Callable

from hs_connectors.contract import Payload
from hs_connectors.errors import RecordTimeout


def await_payload(
    look: Callable[[], Payload | None],
    timeout_s: float,
    pauses_s: tuple[float, float],
    what: str,
    *,
    hint: str = "see the engine's log; is this the store that the server was started with?",
) -> Payload:
    """What `look` finds; it is asked at least once, after pauses that grow from the first to the second of `pauses_s`.

    Raises RecordTimeout with `what` and `hint` after `timeout_s`, and whatever `look` raises.
    """
    deadline, pause = time.monotonic() + timeout_s, pauses_s[0]
    while True:
        payload = look()
        if payload is not None:
            return payload
        left = deadline - time.monotonic()
        if left <= 0:
            raise RecordTimeout(f"{what} did not appear within {timeout_s:g} s", mend=hint)
        time.sleep(min(pause, left))
        pause = min(pause * 2, pauses_s[1])
