"""Events are lines that a reader gets whole, in order."""

from __future__ import annotations

from pathlib import Path

from speculators_core.serving.events import ServeEvent, append_event, read_events


def test_what_is_told_is_read_back_and_a_torn_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert read_events(path) == []
    told = [ServeEvent(event="ready", model="chat", version="1", address="http://127.0.0.1:8000", seconds=1.5),
            ServeEvent(event="rolled_back", model="chat", version="1", reason="version 2: it fell")]  # fmt: skip
    for event in told:
        append_event(path, event)
    with path.open("ab") as file:
        file.write(b'{"event": "rol')
    assert read_events(path) == told
