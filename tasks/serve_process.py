"""`draftsmith serve` as a child process that cannot outlive us: started, awaited by its events, stopped.

    with serve_process("smollm2-chat", home=home, log=log, events=tmp / "events.jsonl",
                       arguments=("--recipe", "r.yaml", "--set", "serve.port=8100")) as serving:
        ready = serving.wait_for("ready", timeout_s=120)
        ...                                                    # send requests to ready.address
        serving.wait_for("rolled", version="2", timeout_s=120) # after `promote` moved the champion
        serving.wait_for("rolled_back", timeout_s=120)         # `version`: the one that serves again

Every kind of event and its fields: `speculators_core.serving.events`. Leaving the block drains: requests in flight end.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from speculators_core.engine.server import read_tail
from speculators_core.errors import EngineError, EngineTimeout
from speculators_core.processes import SupervisedProcess, supervise
from speculators_core.serving.events import Kind, ServeEvent, read_events

_POLL_S = 0.2
_GRACE_S = 60.0


@dataclass
class ServeProcess:
    """A `draftsmith serve` that runs."""

    process: SupervisedProcess
    events_file: Path

    def events(self) -> list[ServeEvent]:
        """What it told so far."""
        return read_events(self.events_file)

    def wait_for(self, *kinds: Kind, timeout_s: float, version: str | None = None, after: int = 0) -> ServeEvent:
        """The first event of one of these kinds (and of this version), past the first `after` events.

        Raises:
            EngineError: it ended instead; the end of its log is quoted. EngineTimeout: no such event in time.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            status = self.process.poll()  # before the events: what it told before it ended counts
            for event in self.events()[after:]:
                if event.event in kinds and version in (None, event.version):
                    return event
            wanted = " or ".join(kinds)
            if status is not None:
                tail = read_tail(self.process.log)[-2000:]
                raise EngineError(f"`draftsmith serve` ended with status {status} before {wanted}:\n{tail}")
            if time.monotonic() > deadline:
                raise EngineTimeout(f"no event {wanted} within {timeout_s:g} s; see {self.process.log}")
            time.sleep(_POLL_S)

    def stop(self, grace_s: float = _GRACE_S) -> None:
        """Let requests in flight end, then end it; for certain after the grace."""
        self.process.stop(grace_s)


@contextmanager
def serve_process(
    target: str,
    *,
    home: Path,
    log: Path,
    events: Path,
    arguments: Sequence[str] = (),
    env: Mapping[str, str | None] | None = None,
) -> Iterator[ServeProcess]:
    """Run `draftsmith serve TARGET` as long as the block lasts; it and all below it are gone afterwards.

    Args:
        target: NAME[@alias].
        home: state root of the deployment.
        log: its output · events: its events, a new file.
        arguments: further options of the command.
        env: laid over our environment; None removes a variable.
    """
    command = [sys.executable, "-m", "flows.cli", "serve", target, "--events", str(events), *arguments]
    process = supervise(command, name="serve", home=home, log=log, env={"DRAFTSMITH_HOME": str(home), **(env or {})})
    serving = ServeProcess(process, events)
    try:
        yield serving
    finally:
        serving.stop()
