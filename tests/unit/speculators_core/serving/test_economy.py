"""Doubt, trial, and the faster way: with planted times."""

from __future__ import annotations

from typing import Any

from speculators_core.serving.config import AutoDisableConfig
from speculators_core.serving.economy import Advice, Economy
from speculators_core.serving.traffic import Traffic
from tests.unit.speculators_core.serving.planted import traffic

RULES = AutoDisableConfig(mode="on", sustained_s=10, retry_s=100)
SATURATED: dict[str, Any] = {"looks": 10, "crowded": 9}


def advise(economy: Economy, span: Traffic, *, speculates: bool, now: float) -> Advice | None:
    """The advice at the end of a span of this traffic."""
    economy.look(Traffic(), speculates=not speculates, now=now - 10)  # another engine served before
    assert economy.look(Traffic(), speculates=speculates, now=now - 10) is None
    return economy.look(span, speculates=speculates, now=now)


def done(advice: Advice | None) -> str | None:
    return None if advice is None else advice.do


def test_usual_traffic_goes_on_drafting() -> None:
    assert advise(Economy(RULES, 50), traffic(looks=10), speculates=True, now=10) is None


def test_a_trial_that_is_faster_stays_until_the_traffic_changes() -> None:
    economy = Economy(RULES, 50)
    assert done(advise(economy, traffic(tpot=0.03, **SATURATED), speculates=True, now=10)) == "alone"
    found = advise(economy, traffic(tpot=0.02, **SATURATED), speculates=False, now=30)
    assert found == Advice("keep", "20.0 ms per output token against 30.0 with drafts")
    assert advise(economy, traffic(**SATURATED), speculates=False, now=50) is None
    assert advise(economy, Traffic(looks=10), speculates=False, now=70) is None, "no traffic says nothing"
    assert done(advise(economy, traffic(looks=10), speculates=False, now=90)) == "drafting"


def test_a_trial_that_is_slower_ends_and_is_not_repeated_soon() -> None:
    economy = Economy(RULES, 50)
    advise(economy, traffic(tpot=0.02, **SATURATED), speculates=True, now=10)
    assert done(advise(economy, traffic(tpot=0.03), speculates=False, now=30)) == "drafting"
    assert advise(economy, traffic(**SATURATED), speculates=True, now=50) is None
    assert done(advise(economy, traffic(**SATURATED), speculates=True, now=120)) == "alone"


def test_a_trial_without_requests_goes_on() -> None:
    economy = Economy(RULES, 50)
    advise(economy, traffic(**SATURATED), speculates=True, now=10)
    assert advise(economy, traffic(finished=3), speculates=False, now=30) is None
    assert done(advise(economy, traffic(tpot=0.001), speculates=False, now=50)) == "keep"


def test_a_report_is_made_once_and_nothing_else() -> None:
    economy = Economy(RULES.model_copy(update={"mode": "report"}), 50)
    assert done(advise(economy, traffic(**SATURATED), speculates=True, now=10)) == "report"
    assert advise(economy, traffic(**SATURATED), speculates=True, now=30) is None
    assert done(advise(economy, traffic(**SATURATED), speculates=True, now=130)) == "report"


def test_off_looks_at_nothing() -> None:
    economy = Economy(RULES.model_copy(update={"mode": "off"}), 50)
    assert advise(economy, traffic(**SATURATED), speculates=True, now=10) is None
