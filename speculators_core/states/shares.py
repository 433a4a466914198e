"""A capture that several engines share: each takes every n-th shard of one plan, in one workspace.

A shard appears whole, so a part that died goes on at its next one, and nobody writes what another writes. Whoever
opens the workspace as a whole afterwards finds the shards finished, compares them with a forward, and makes them a set.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from speculators_core.engine.server import Engine, serve
from speculators_core.states.collect import Collector, Rows
from speculators_core.states.config import CaptureConfig
from speculators_core.states.keeper import Station
from speculators_core.states.parity import ParityGate
from speculators_core.states.source import Tally, request_states
from speculators_core.types import ProgressCallback
from speculators_core.verifier.facts import read_facts

_BY_NEXT_TOKENS = {"parity_memory_gib": 1e-9}
"""A part is checked by its engine's next tokens: one forward for all parts comes at the end."""


def capture_share(
    rows: Rows,
    collector: Collector,
    station: Station,
    config: CaptureConfig,
    *,
    verifier_dir: Path,
    home: Path,
    check: Callable[[Engine], None],
    look: Callable[[], None],
    progress: ProgressCallback,
) -> Tally:
    """Capture what the collector's share still misses, by one engine.

    Args:
        look: called again and again while the engine starts; what it raises ends the capture.
        progress: called at every row, likewise.

    Raises:
        CaptureError: a gate failed, or the engine died; finished shards are kept.
        EngineError: it did not start.
    """
    missing = set(collector.missing())
    if not missing:
        return Tally()
    facts = read_facts(verifier_dir)
    gate = ParityGate(rows, collector, config.model_copy(update=_BY_NEXT_TOKENS), verifier_dir, facts, False)
    gate.positions = [position for position in gate.positions if position in missing]
    gate.prepare()
    with serve(station.runtime, station.spec, home=home, while_starting=look) as engine:
        check(engine)
        reader = station.store.reader()
        return request_states(rows, collector, gate, engine, config, reader, progress)
