"""Statistics against known answers, and against simulations with planted rates."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from speculators_core.errors import EvaluationError
from speculators_core.evaluation.statistics import (
    acceptance_length,
    al_by_k,
    binomial_shortfall,
    compare_paired,
    holm,
    ratio_interval,
    resampled_sums,
)
from tests.unit.speculators_core.evaluation.planted import expected_al, planted_counts, prompt_rates


def test_acceptance_length_counts_the_bonus_token_and_weighs_prompts_by_their_drafts():
    assert acceptance_length([43], [10]) == pytest.approx(1 + 10 / 43)
    assert acceptance_length([10, 30], [10, 0]) == pytest.approx(1.25)  # not the mean of 2.0 and 1.0
    assert acceptance_length([], []) == 1.0
    assert acceptance_length([5, 0], [0, 0]) == 1.0


def test_resampling_preserves_the_mean_and_keeps_columns_aligned():
    columns = np.array([[1.0, 2.0], [3.0, 6.0], [10.0, 20.0]])
    sums = resampled_sums(columns, 50_000, seed=1)
    assert np.allclose(sums[:, 1], 2 * sums[:, 0])
    assert sums[:, 0].mean() == pytest.approx(14.0, rel=0.01)
    assert np.array_equal(sums, resampled_sums(columns, 50_000, seed=1))
    assert not np.array_equal(sums, resampled_sums(columns, 50_000, seed=2))


def test_chunked_resampling_is_bounded_and_the_same_for_many_prompts(monkeypatch):
    from speculators_core.evaluation import statistics

    columns = np.random.default_rng(0).random((50, 2))
    whole = resampled_sums(columns, 200, seed=3)
    monkeypatch.setattr(statistics, "_CHUNK_ELEMENTS", 50 * 7)
    assert np.allclose(whole, resampled_sums(columns, 200, seed=3))


def test_interval_of_equal_prompts_has_no_width_and_of_two_prompts_spans_them():
    interval = ratio_interval([10] * 20, [7] * 20, confidence=0.95, resamples=500, seed=0)
    assert interval.low == interval.high == pytest.approx(1.7)
    wide = ratio_interval([10, 10], [0, 10], confidence=0.95, resamples=2000, seed=0)
    assert (wide.low, wide.high) == (1.0, 2.0)


def test_interval_covers_the_truth_about_as_often_as_it_says():
    generator = np.random.default_rng(7)
    rates = prompt_rates(20_000, 0.45, generator)
    truth = expected_al(rates)
    drafts, accepted = planted_counts(rates, generator)
    hits = 0
    trials = 400
    for trial in range(trials):
        drawn = generator.integers(0, len(rates), 100)
        interval = ratio_interval(drafts[drawn], accepted[drawn].sum(1), confidence=0.95, resamples=400, seed=trial)
        hits += interval.low <= truth <= interval.high
    assert 0.91 <= hits / trials <= 0.985


def test_paired_comparison_of_an_arm_with_itself_is_certain():
    drafts, accepted = planted_counts(np.full(60, 0.4), np.random.default_rng(0))
    arm = drafts, accepted.sum(1)
    found = compare_paired(arm, arm, margin=0.03, confidence=0.95, resamples=999, seed=0)
    assert (found.ratio, found.lower, found.upper) == (1.0, 1.0, 1.0)
    assert found.p_inferior == pytest.approx(1 / 1000)
    assert found.p_noninferior == 1.0


def test_pairing_narrows_the_bounds_that_prompts_have_in_common():
    generator = np.random.default_rng(5)
    rates = prompt_rates(200, 0.5, generator)
    first, second = planted_counts(rates, generator), planted_counts(rates, generator)
    shuffled = generator.permutation(200)
    arm = first[0], first[1].sum(1)
    paired = compare_paired(arm, (second[0], second[1].sum(1)), margin=0.03, confidence=0.95, resamples=2000, seed=0)
    unpaired = compare_paired(
        arm, (second[0][shuffled], second[1].sum(1)[shuffled]), margin=0.03, confidence=0.95, resamples=2000, seed=0
    )
    assert paired.upper - paired.lower < 0.8 * (unpaired.upper - unpaired.lower)


def test_paired_comparison_refuses_other_prompts():
    with pytest.raises(EvaluationError, match="same prompts"):
        compare_paired(([1, 1], [0, 0]), ([1], [0]), margin=0.03, confidence=0.95, resamples=100, seed=0)


def test_holm_against_the_textbook():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx((0.03, 0.06, 0.06, 0.02))
    assert holm([0.9, 0.8]) == pytest.approx((1.0, 1.0))
    assert holm([]) == ()


def test_fisher_shortfall_against_known_values():
    assert binomial_shortfall(10, 10, 10, 10) == 1.0
    # the tea-tasting table: 1 of 4 against 3 of 4, one-sided: 17 / 70
    assert binomial_shortfall(1, 4, 3, 4) == pytest.approx(17 / 70)
    assert binomial_shortfall(100, 128, 127, 128) < 1e-6
    assert binomial_shortfall(125, 128, 127, 128) > 0.05


def test_al_by_k_ends_at_al_and_agrees_with_a_run_at_the_smaller_k():
    generator = np.random.default_rng(2)
    rates = np.full(1000, 0.6)
    drafts, accepted = planted_counts(rates, generator, k=5)
    by_k = al_by_k(drafts, accepted)
    assert by_k[-1] == pytest.approx(acceptance_length(drafts, accepted.sum(1)))
    assert all(a < b for a, b in pairwise(by_k))
    for k in (1, 3):
        again, accepted_again = planted_counts(rates, generator, k=k)
        assert by_k[k - 1] == pytest.approx(acceptance_length(again, accepted_again.sum(1)), rel=0.01)
