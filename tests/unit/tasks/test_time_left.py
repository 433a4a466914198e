"""How long a stage will go on."""

from __future__ import annotations

from tasks.observe import TimeLeft


def test_the_pace_is_that_since_the_first_look_and_waiting_brings_the_end_nearer() -> None:
    left = TimeLeft()
    assert left(100.0, 50, 100) is None  # resumed at one half, after a long start
    assert left(105.0, 50, 100) is None
    assert left(110.0, 60, 100) == 40.0
    assert left(115.0, 60, 100) == 35.0  # nothing new: the estimate only runs down
    assert left(200.0, 60, 100) == 0.0
    assert left(200.0, 75, 100) == 100.0
    assert left(210.0, 100, 100) == 0.0
