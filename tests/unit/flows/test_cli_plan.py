"""What `draftsmith plan` says of time and cost."""

from __future__ import annotations

from flows.cli_plan import numbers, sum_of
from speculators_core.lifecycle.plan import RELEASE, PlannedStage


def stage(name: str, seconds: float | None, cost: float | None = None) -> PlannedStage:
    return PlannedStage(name=name, state="run", why="was never run here", seconds=seconds, cost=cost)


def test_a_sum_with_something_unknown_in_it_says_so() -> None:
    prepare, release = stage("prepare", 1.0), stage(RELEASE, None)
    assert sum_of([prepare, stage("train", None), release]) == "unknown; at least 1 s"
    assert sum_of([stage("train", None), release]) == "unknown"
    assert sum_of([prepare, stage("train", 100.0, 2.5), release]) == "2 min, 2.50"
    assert sum_of([release]) == "", "it is quick"


def test_only_a_stage_that_will_take_unknown_time_has_a_question_mark() -> None:
    assert numbers(stage("train", None))[2] == "?"
    assert numbers(stage(RELEASE, None))[2] == ""
    assert numbers(PlannedStage(name="train", state="cached", why="in the store"))[2] == ""
