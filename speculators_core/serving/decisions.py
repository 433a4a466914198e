"""When to take a version back, and when the verifier alone may be faster: pure rules over counts.

AL is a mean over drafting steps. A draft is accepted from its front, so the counters per position hold the whole
distribution of A, the accepted tokens of a step: P(A ≥ i) is the rate p_i of position i, E[A] = Σ p_i and
E[A²] = Σ (2i − 1) p_i. Steps of one reply resemble each other, which widens the variance of the mean by a design
effect. The ratio of two ALs then has a normal bound by the delta method, on the log scale.
"""

from __future__ import annotations

import math

from speculators_core.engine.metrics import SpecDecodeCounters
from speculators_core.serving.config import AutoDisableConfig, WatchConfig
from speculators_core.serving.traffic import Traffic

_Z = 2.326  # one-sided 99 %: a rollback by chance is rarer than one look in a hundred, and looks are not independent
_DESIGN_EFFECT = 6.0  # 5.3 by the bootstrap over prompts of an evaluation: 128 replies of 80 steps, AL 1.63 ± 0.02
_FEW_ERRORS = 3


def al_ratio_upper(now: SpecDecodeCounters, before: SpecDecodeCounters | float) -> float:
    """Upper one-sided 99 % bound of AL(now) / AL(before); `before` as counts, or as an AL that is taken as exact."""
    spread = _log_variance(now)
    if isinstance(before, SpecDecodeCounters):
        reference, spread = before.acceptance_length, spread + _log_variance(before)
    else:
        reference = before
    return now.acceptance_length / reference * math.exp(_Z * math.sqrt(spread))


def _log_variance(counted: SpecDecodeCounters) -> float:
    """Variance of log AL by the delta method."""
    mean = counted.acceptance_length - 1
    square = sum((2 * i + 1) * rate for i, rate in enumerate(counted.acceptance_per_position))
    return _DESIGN_EFFECT * max(square - mean**2, 0.0) / counted.drafts / (1 + mean) ** 2


def rollback_reason(
    now: Traffic, before: Traffic, rules: WatchConfig, *, same_verifier: bool, registered_al: float | None
) -> str | None:
    """Why a version that took over must be taken back; None: nothing speaks against it (yet).

    Errors count whatever was displaced. AL and time are held against the displaced version only on the same verifier:
    the gate compared them there. Where that served too little to tell, and on another verifier, AL is held against
    `registered_al`, the one that is expected of the version; time is not judged then.

    Args:
        now: traffic of the new version since it took over · before: traffic of the displaced one.
        registered_al: AL that the displaced version (on the same verifier), else the new one, was registered with.
    """
    if now.errors >= _FEW_ERRORS and now.requests >= rules.min_requests and now.error_rate > rules.max_error_rate:
        return f"{now.errors} of {now.requests} requests failed; {rules.max_error_rate:.1%} are tolerated"
    if now.spec.drafts >= rules.min_drafts:
        measured = same_verifier and before.spec.drafts >= rules.min_drafts
        reference = before.spec if measured else registered_al
        if reference is not None and al_ratio_upper(now.spec, reference) < 1 - rules.al_margin:
            al = reference if isinstance(reference, float) else reference.acceptance_length
            return (
                f"served acceptance length {now.spec.acceptance_length:.3f} over {now.spec.drafts} drafts against "
                f"{al:.3f} {'before' if measured else 'registered'}: the loss exceeds {rules.al_margin:.0%}"
            )
    enough = min(now.finished, before.finished) >= rules.min_requests
    if same_verifier and enough and rules.max_slowdown is not None and now.tpot > rules.max_slowdown * before.tpot:
        return (
            f"{1000 * now.tpot:.1f} ms per output token against {1000 * before.tpot:.1f} before: "
            f"more than {rules.max_slowdown:g} times"
        )
    return None


def speculation_doubt(recent: Traffic, rules: AutoDisableConfig) -> str | None:
    """Why speculation may cost more than it gives on this traffic; None where nothing says so.

    Drafts spend compute to save steps: there is none to spare where requests wait for a place, and few steps to save
    where prompts are long and replies short.
    """
    if recent.looks and recent.crowded / recent.looks >= rules.saturated_share:
        return f"the engine is saturated: requests waited at {recent.crowded} of {recent.looks} looks"
    if recent.generated_tokens and recent.prompt_tokens > rules.prefill_heavy * recent.generated_tokens:
        return (
            f"the traffic is heavy in prompts: {recent.prompt_tokens} prompt tokens for {recent.generated_tokens} "
            "generated ones"
        )
    return None


def is_faster_alone(alone: Traffic, drafting: Traffic, min_requests: int) -> bool | None:
    """Whether the verifier alone takes less time per output token than with its draft; None: too little to tell."""
    if min(alone.finished, drafting.finished) < min_requests:
        return None
    return alone.tpot < drafting.tpot


def fits_beside(available_bytes: int, weights_bytes: int, kv_cache_bytes: int) -> bool:
    """Whether a second engine of such weights and KV cache fits into the memory that is available.

    Weights are read before they are laid out, and the engine itself (torch, its buffers) takes some 1.5 GiB.
    """
    return available_bytes > 1.5 * weights_bytes + kv_cache_bytes + 1.5 * 2**30
