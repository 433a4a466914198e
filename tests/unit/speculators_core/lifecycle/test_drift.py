"""A fall of served acceptance is told by an interval, needs enough traffic, and is one incident until it is over."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from speculators_core.lifecycle import drift
from speculators_core.lifecycle.drift import CounterReading, DriftConfig, DriftVerdict, Incident, Registered

REGISTERED = Registered(al=1.60, al_low=1.55)
NOW = 100_000.0


def windows(
    al: float, *, count: int = 30, drafts: int = 200, version: str = "1", seed: int = 0
) -> list[drift.ServedWindow]:
    """Windows of a minute whose drafts each have K = 3 tokens, accepted so that the AL is as given on average."""
    generator = np.random.default_rng(seed)
    accepted = generator.binomial(3 * drafts, (al - 1) / 3, size=count)
    return [
        drift.ServedWindow(version=version, start=NOW - 60 * (n + 1), end=NOW - 60 * n, drafts=drafts, accepted=int(a))
        for n, a in enumerate(accepted)
    ]


def judge(found: list[drift.ServedWindow], config: DriftConfig = DriftConfig()) -> DriftVerdict:  # noqa: B008
    return drift.judge(found, REGISTERED, "1", now=NOW, config=config)


def test_the_limit_is_below_the_registered_interval() -> None:
    assert judge([]).limit == pytest.approx(0.9 * 1.55)
    alone = drift.judge([], Registered(al=1.6), "1", now=NOW, config=DriftConfig())
    assert alone.limit == pytest.approx(0.9 * 1.6)


@pytest.mark.parametrize(("al", "state"), [(1.60, "steady"), (1.41, "steady"), (1.30, "drifted")])
def test_a_fall_is_told_from_its_interval(al: float, state: str) -> None:
    found = judge(windows(al))
    assert found.state == state and found.interval is not None and found.interval[0] < al < found.interval[1]


def test_a_point_below_the_limit_is_not_enough() -> None:
    few = judge(windows(1.38, count=12, drafts=170))
    assert few.al is not None and few.al < few.limit and few.state == "unclear"
    assert judge(windows(1.38, count=50, drafts=4000)).state == "drifted"


def test_false_alarms_are_rare_at_the_limit_itself() -> None:
    alarms = sum(judge(windows(0.9 * 1.55, seed=seed)).state == "drifted" for seed in range(200))
    assert alarms <= 6, "half a percent each, and the bootstrap's own inexactness"


def test_too_little_other_or_old_traffic_tells_nothing() -> None:
    assert judge(windows(1.2, count=9, drafts=1000)).state == "unclear"
    assert judge(windows(1.2, drafts=50)).state == "unclear"
    assert judge(windows(1.2, version="2")).drafts == 0
    old = [window.model_copy(update={"start": 0.0, "end": 60.0}) for window in windows(1.2)]
    assert judge(old).drafts == 0


def test_one_incident_until_it_is_over() -> None:
    def verdict(state: str) -> DriftVerdict:
        return DriftVerdict.model_validate({"state": state, "limit": 1.4, "reason": state})

    begun = drift.follow(None, verdict("drifted"), "1", now=5.0)
    assert begun == Incident(version="1", since=5.0, reason="drifted")
    assert drift.follow(begun, verdict("drifted"), "1", now=9.0) == begun
    assert drift.follow(begun, verdict("unclear"), "1", now=9.0) == begun
    assert drift.follow(begun, verdict("steady"), "1", now=9.0) is None
    assert drift.follow(begun, verdict("unclear"), "2", now=9.0) is None, "another version serves"
    assert drift.follow(None, verdict("unclear"), "1", now=9.0) is None
    again = drift.follow(None, verdict("drifted"), "1", now=11.0)
    assert again is not None and again.since == 11.0


def test_the_open_incident_is_kept_for_the_version_that_serves(tmp_path: Path) -> None:
    incident = Incident(version="1", since=5.0, reason="drifted")
    drift.note_incident(tmp_path, "chat", incident)
    assert drift.read_incident(tmp_path, "chat", "1") == incident
    assert drift.read_incident(tmp_path, "chat", "2") is None and drift.read_incident(tmp_path, "talk", "1") is None
    drift.note_incident(tmp_path, "chat", None)
    assert drift.read_incident(tmp_path, "chat", "1") is None


def test_counters_become_windows_over_restarts() -> None:
    def reading(time: float, drafts: int, version: str = "1") -> CounterReading:
        return CounterReading(version=version, time=time, drafts=drafts, accepted=drafts // 2)

    assert drift.window_between(None, reading(1, 5)) is None
    assert drift.window_between(reading(1, 4), reading(2, 10, version="2")) is None
    plain = drift.window_between(reading(1, 4), reading(2, 10))
    assert plain is not None and (plain.drafts, plain.accepted, plain.start, plain.end) == (6, 3, 1, 2)
    anew = drift.window_between(reading(1, 40), reading(2, 10))
    assert anew is not None and (anew.drafts, anew.accepted) == (10, 5)


def test_windows_are_read_back_and_a_torn_line_costs_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert drift.read_windows(tmp_path, "chat") == ()
    noted = windows(1.5)
    for window in noted:
        drift.note_window(tmp_path, "chat", window)
    with drift.windows_path(tmp_path, "chat").open("ab") as file:
        file.write(b'{"version": "1", "sta\n')
    drift.note_window(tmp_path, "chat", noted[0])
    assert drift.read_windows(tmp_path, "chat") == (*noted, noted[0])
    monkeypatch.setattr(drift, "_MAX_BYTES", 2000)
    drift.note_window(tmp_path, "chat", noted[1])
    kept = drift.read_windows(tmp_path, "chat")
    assert kept[-1] == noted[1] and 2 < len(kept) < len(noted)
