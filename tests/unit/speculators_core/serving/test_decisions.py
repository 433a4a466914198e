"""What disappoints is taken back, what doesn't stays: planted falls, errors and delays; chance is rarely blamed."""

from __future__ import annotations

import pytest

from speculators_core.serving.config import AutoDisableConfig, WatchConfig
from speculators_core.serving.decisions import (
    al_ratio_upper,
    fits_beside,
    is_faster_alone,
    rollback_reason,
    speculation_doubt,
)
from speculators_core.serving.traffic import Traffic
from tests.unit.speculators_core.serving.planted import counted, traffic

RULES = WatchConfig()


def reason(now: Traffic, before: Traffic, *, same: bool = True, registered: float | None = 1.6) -> str | None:
    return rollback_reason(now, before, RULES, same_verifier=same, registered_al=registered)


def test_an_equal_version_stays() -> None:
    assert reason(traffic(seed=1), traffic(seed=2)) is None


@pytest.mark.parametrize("fall", [0.25, 0.4])
def test_a_fall_of_acceptance_is_seen(fall: float) -> None:
    found = reason(traffic(al=1.6 * (1 - fall)), traffic())
    assert found is not None and "before: the loss exceeds 10%" in found


def test_chance_is_rarely_blamed_at_the_margin_itself() -> None:
    blamed = sum(reason(traffic(al=1.6 * 0.9, seed=seed), traffic(seed=1000 + seed)) is not None for seed in range(100))
    assert blamed <= 3


def test_the_bound_is_that_of_the_counts() -> None:
    few, many = (al_ratio_upper(counted(1.6, n), 1.6) for n in (500, 50_000))
    assert 1 < many < few < 1.3
    assert al_ratio_upper(counted(1.0, 1000), 1.6) == pytest.approx(1 / 1.6), "nothing accepted has no spread"


def test_too_little_traffic_says_nothing() -> None:
    assert reason(traffic(al=1.0, drafts=RULES.min_drafts - 1), traffic()) is None
    assert reason(traffic(requests=RULES.min_requests - 1, errors=30), traffic()) is None
    assert reason(traffic(tpot=1.0, finished=RULES.min_requests - 1), traffic()) is None


def test_where_the_displaced_served_too_little_the_registered_acceptance_counts() -> None:
    quiet = traffic(drafts=10)
    found = reason(traffic(al=1.05), quiet)
    assert found is not None and "registered" in found
    assert reason(traffic(al=1.05), quiet, registered=None) is None


def test_on_another_verifier_a_version_is_held_against_itself() -> None:
    before = traffic(al=2.5, tpot=0.001)
    assert reason(traffic(al=1.6), before, same=False, registered=1.6) is None, "it was gated on its own verifier"
    assert reason(traffic(al=1.1), before, same=False, registered=1.6) is not None


def test_failed_requests_take_it_back() -> None:
    found = reason(traffic(errors=5), traffic())
    assert found == "5 of 100 requests failed; 2.0% are tolerated"
    assert reason(traffic(errors=2), traffic()) is None


def test_slower_tokens_take_it_back() -> None:
    found = reason(traffic(tpot=0.04), traffic(tpot=0.02))
    assert found is not None and found.startswith("40.0 ms per output token against 20.0")
    assert reason(traffic(tpot=0.029), traffic(tpot=0.02)) is None
    unjudged = RULES.model_copy(update={"max_slowdown": None})
    assert rollback_reason(traffic(tpot=1), traffic(), unjudged, same_verifier=True, registered_al=1.6) is None


def test_speculation_is_doubted_under_saturation_and_long_prompts_only() -> None:
    rules = AutoDisableConfig()
    usual = traffic(prompt_tokens=10_000, generated_tokens=5000, looks=10, crowded=1)
    assert speculation_doubt(usual, rules) is None and speculation_doubt(Traffic(), rules) is None
    assert "saturated" in str(speculation_doubt(traffic(looks=10, crowded=5), rules))
    assert "heavy in prompts" in str(speculation_doubt(traffic(prompt_tokens=200_000, generated_tokens=5000), rules))


def test_which_way_is_faster_takes_enough_requests() -> None:
    assert is_faster_alone(traffic(tpot=0.01), traffic(tpot=0.02), 50) is True
    assert is_faster_alone(traffic(tpot=0.03), traffic(tpot=0.02), 50) is False
    assert is_faster_alone(traffic(finished=49), traffic(), 50) is None


def test_a_second_engine_needs_weights_cache_and_itself() -> None:
    gib = 2**30
    assert fits_beside(4 * gib, gib // 2, gib)
    assert not fits_beside(3 * gib, gib, gib)
