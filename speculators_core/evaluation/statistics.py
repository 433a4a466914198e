"""Acceptance length over prompts, with intervals and paired comparisons by bootstrap.

AL = 1 + accepted / drafts is a ratio of sums, so a resample draws *prompts* with replacement and
divides the resampled sums: prompts with long replies weigh more, as they do in serving, and the
drafts of one reply, which are not independent, stay together.
All functions take per-prompt counts as [N] arrays in one order of prompts, and are deterministic by seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from speculators_core.errors import EvaluationError
from speculators_core.types import StrictModel

Floats = NDArray[np.float64]
_CHUNK_ELEMENTS = 2_000_000  # bounds each of the few arrays of draws held at once to 16 MB


class Interval(StrictModel):
    """A two-sided interval; `confidence` is its nominal coverage."""

    low: float
    high: float
    confidence: float


class Comparison(StrictModel):
    """Candidate against incumbent on the same prompts, as a ratio of acceptance lengths.

    lower and upper are the ends of *one-sided* bounds (each at `confidence`).
    p_inferior: bootstrap p-value of "the loss exceeds the margin" against "it does not", so a small one shows
    non-inferiority; p_noninferior is its mirror image, so a small one shows inferiority.
    """

    ratio: float
    lower: float
    upper: float
    margin: float
    p_inferior: float
    p_noninferior: float
    prompts: int


def acceptance_length(drafts: ArrayLike, accepted: ArrayLike) -> float:
    """1 + Σ accepted / Σ drafts (the bonus token counted, as vLLM does); 1.0 when nothing was drafted."""
    total = float(np.sum(np.asarray(drafts, dtype=np.float64)))
    return 1.0 + float(np.sum(np.asarray(accepted, dtype=np.float64))) / total if total else 1.0


def resampled_sums(columns_NC: ArrayLike, resamples: int, seed: int) -> Floats:
    """[resamples, C]: sums of the columns over prompts drawn with replacement; rows are aligned between columns."""
    columns = np.asarray(columns_NC, dtype=np.float64)
    if columns.ndim != 2 or not len(columns):
        raise EvaluationError(
            f"a bootstrap needs at least one prompt, got counts of shape {columns.shape}",
            mend="evaluate on at least 100 prompts",
        )
    count = len(columns)
    generator = np.random.default_rng(seed)
    sums = np.empty((resamples, columns.shape[1]))
    step = max(1, _CHUNK_ELEMENTS // count)
    for start in range(0, resamples, step):
        size = min(step, resamples - start)
        drawn = generator.integers(0, count, (size, count)) + count * np.arange(size)[:, None]
        weights = np.bincount(drawn.ravel(), minlength=size * count).reshape(size, count)
        sums[start : start + size] = weights.astype(np.float64) @ columns
    return sums


def ratio_interval(drafts: ArrayLike, accepted: ArrayLike, *, confidence: float, resamples: int, seed: int) -> Interval:
    """Percentile bootstrap interval of AL over prompts (Efron and Tibshirani 1993, ch. 13)."""
    sums = resampled_sums(np.stack([_vector(drafts), _vector(accepted)], axis=1), resamples, seed)
    tail = (1.0 - confidence) / 2
    low, high = np.quantile(_al(sums[:, 0], sums[:, 1]), [tail, 1 - tail])
    return Interval(low=float(low), high=float(high), confidence=confidence)


def compare_paired(
    candidate: tuple[ArrayLike, ArrayLike],
    incumbent: tuple[ArrayLike, ArrayLike],
    *,
    margin: float,
    confidence: float,
    resamples: int,
    seed: int,
) -> Comparison:
    """One-sided paired bootstrap of AL(candidate) / AL(incumbent) against 1 − margin.

    Each argument is (drafts, accepted) over the same prompts in the same order; a resample takes both
    arms' counts of each drawn prompt, which removes what prompts have in common.
    """
    arrays = [_vector(array) for array in (*candidate, *incumbent)]
    if len({len(array) for array in arrays}) != 1:
        raise EvaluationError(
            f"a paired comparison needs the same prompts in both arms, got {len(arrays[0])} and {len(arrays[2])}",
            mend="measure both drafts on the same prepared prompts",
        )
    sums = resampled_sums(np.stack(arrays, axis=1), resamples, seed)
    ratios = _al(sums[:, 0], sums[:, 1]) / _al(sums[:, 2], sums[:, 3])
    bound = 1.0 - margin
    lower, upper = np.quantile(ratios, [1 - confidence, confidence])
    return Comparison(
        ratio=acceptance_length(*candidate) / acceptance_length(*incumbent),
        lower=float(lower),
        upper=float(upper),
        margin=margin,
        # one added above and below: a bootstrap cannot show a p-value of zero
        p_inferior=float((np.count_nonzero(ratios < bound) + 1) / (resamples + 1)),
        p_noninferior=float((np.count_nonzero(ratios >= bound) + 1) / (resamples + 1)),
        prompts=len(arrays[0]),
    )


def holm(p_values: Sequence[float]) -> tuple[float, ...]:
    """Holm's step-down adjusted p-values, in the order given (Holm 1979)."""
    adjusted = [0.0] * len(p_values)
    running = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        running = max(running, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = running
    return tuple(adjusted)


def binomial_shortfall(successes: int, trials: int, other_successes: int, other_trials: int) -> float:
    """One-sided Fisher exact p-value of "the first share is lower than the second" (1.0: no sign of it)."""
    from math import comb

    total, hits = trials + other_trials, successes + other_successes
    ways = sum(
        comb(trials, x) * comb(other_trials, hits - x)
        for x in range(max(0, hits - other_trials), min(successes, hits) + 1)
    )
    return min(1.0, ways / comb(total, hits))


def sign_test(successes: int, trials: int) -> float:
    """One-sided p-value of "a trial succeeds no more often than not": P(X ≥ successes) for X ~ Binomial(trials, ½)."""
    from math import comb

    return float(sum(comb(trials, x) for x in range(successes, trials + 1)) / 2**trials)


def al_by_k(drafts: ArrayLike, accepted_NK: ArrayLike) -> tuple[float, ...]:
    """AL at each K′ = 1…K from one run at K: 1 + Σ_{i ≤ K′} (accepted at position i) / drafts.

    Exact for the drafts of this run; for a sequential draft run at K′ it assumes that the points
    at which drafting starts are as hard as these were.
    """
    total = float(_vector(drafts).sum())
    per_position = np.asarray(accepted_NK, dtype=np.float64).sum(axis=0)
    return tuple(float(1.0 + value / total) if total else 1.0 for value in np.cumsum(per_position))


def _al(drafts: Floats, accepted: Floats) -> Floats:
    return 1.0 + np.divide(accepted, drafts, out=np.zeros_like(accepted), where=drafts > 0)


def _vector(values: ArrayLike) -> Floats:
    array: NDArray[Any] = np.asarray(values, dtype=np.float64)
    assert array.ndim == 1
    return array
