"""The gate: may this draft replace what serves?

Three outcomes. *fail*: a rule is shown to be broken. *inconclusive*: too little was measured to tell (too few prompts,
or the interval straddles the margin): draw more prompts up to `max_prompts`, then do not promote. *pass*: every rule
is shown to hold. The draft's outcome is the worst of its checks.

Against an incumbent the rule is non-inferiority: the one-sided paired bootstrap bound of AL(candidate) / AL(incumbent)
over the same prompts must lie above 1 − margin (pass) or below it (fail). Where speed is required, the rounds with
alternating arms are held against `min_speed_ratio` by a sign test, at each concurrency. Domains of at least
`domain_min_prompts` prompts are gated by the rule of the whole, their p-values corrected by Holm's method; smaller
ones are only reported.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from speculators_core.errors import EvaluationError
from speculators_core.evaluation.report import EvaluationReport, PromptCounts, Speed
from speculators_core.evaluation.statistics import Comparison, compare_paired, holm, sign_test
from speculators_core.lifecycle.config import GateConfig
from speculators_core.types import StrictModel

Outcome = Literal["pass", "fail", "inconclusive"]
_WORST_FIRST: tuple[Outcome, ...] = ("fail", "inconclusive", "pass")


class Check(StrictModel):
    """One rule, its outcome, and the sentence that says why."""

    name: str
    outcome: Outcome
    reason: str


class GateDecision(StrictModel):
    """The gate's outcome with its reasons (one for each check) and the numbers behind them.

    next_prompts: where the outcome is inconclusive for want of prompts, how many would probably decide it
    (never above `max_prompts`; None: more prompts cannot help).
    """

    outcome: Outcome
    checks: tuple[Check, ...]
    reported: tuple[str, ...]
    numbers: dict[str, float]
    next_prompts: int | None = None

    @property
    def passed(self) -> bool:
        """Whether the draft may be promoted."""
        return self.outcome == "pass"

    @property
    def reasons(self) -> tuple[str, ...]:
        """Every check's sentence, the decisive ones first."""
        ordered = sorted(self.checks, key=lambda check: _WORST_FIRST.index(check.outcome))
        return tuple(f"{check.outcome}: {check.reason}" for check in ordered)


def decide(
    candidate: EvaluationReport, incumbent: EvaluationReport | None, config: GateConfig | None = None
) -> GateDecision:
    """Apply the gate to a measured candidate, against the incumbent measured on the same verifier and prompts.

    Args:
        candidate: its report, with per-prompt counts.
        incumbent: the serving draft's report, or None where nothing serves yet.
        config: the recipe's rules.

    Raises: EvaluationError where the two reports cannot be compared.
    """
    config = config or GateConfig()
    checks = [_check_prompts(candidate, config), *_check_floor(candidate, config)]
    reported: list[str] = []
    numbers = {"al": candidate.acceptance.al, "prompts": float(candidate.acceptance.prompts)}
    if candidate.acceptance.interval is not None:
        numbers |= {"al_low": candidate.acceptance.interval.low, "al_high": candidate.acceptance.interval.high}

    lossless = _check_lossless(candidate)
    if candidate.measured_by != "engine":
        reason = f"acceptance was measured by {candidate.measured_in_words}; nothing that was never served is promoted"
        checks.append(Check(name="served", outcome="inconclusive", reason=reason))
    if config.lossless == "require":
        checks.append(lossless)
    else:
        reported.append(f"lossless (report only): {lossless.reason}")
    if config.speed == "require":
        checks += _check_speed(candidate, config)
    elif candidate.told_speed is not None:
        reported.append(f"speed (report only): {_speed_sentence(candidate.told_speed)}")
    if candidate.told_speed is not None:
        numbers["speed_ratio"] = candidate.told_speed.ratio

    comparison: Comparison | None = None
    if incumbent is not None:
        _require_comparable(candidate, incumbent)
        comparison = _compare(candidate.per_prompt, incumbent.per_prompt, config)
        p_values = comparison.p_inferior, comparison.p_noninferior
        checks.append(_check_comparison("incumbent", comparison, *p_values, config))
        numbers |= {"incumbent_al": incumbent.acceptance.al, "ratio": comparison.ratio}
        numbers |= {"ratio_lower": comparison.lower, "ratio_upper": comparison.upper}
        domain_checks, domain_notes = _check_domains(candidate.per_prompt, incumbent.per_prompt, config)
        checks += domain_checks
        reported += domain_notes

    outcome = min((check.outcome for check in checks), key=_WORST_FIRST.index)
    return GateDecision(
        outcome=outcome,
        checks=tuple(checks),
        reported=tuple(reported),
        numbers=numbers,
        next_prompts=_next_prompts(candidate, comparison, checks, config) if outcome == "inconclusive" else None,
    )


def _check_prompts(candidate: EvaluationReport, config: GateConfig) -> Check:
    count = candidate.acceptance.prompts
    enough = count >= config.min_prompts
    reason = f"{count} prompts were evaluated; the gate asks for {config.min_prompts}"
    return Check(name="prompts", outcome="pass" if enough else "inconclusive", reason=reason)


def _check_floor(candidate: EvaluationReport, config: GateConfig) -> list[Check]:
    acceptance = candidate.acceptance
    checks = [
        Check(
            name="floor",
            outcome="pass" if acceptance.al >= config.al_floor else "fail",
            reason=f"AL {acceptance.al:.3f} at K = {acceptance.k}; the floor is {config.al_floor:.3f}",
        )
    ]
    if config.al_floor_low is not None:
        if acceptance.interval is None:
            outcome: Outcome = "inconclusive"
            reason = "there is no interval of AL to hold against its floor"
        else:
            interval = acceptance.interval
            reached = interval.low >= config.al_floor_low
            outcome = "pass" if reached else "fail" if interval.high < config.al_floor_low else "inconclusive"
            reason = f"AL's interval begins at {interval.low:.3f}; its floor is {config.al_floor_low:.3f}"
        checks.append(Check(name="floor_low", outcome=outcome, reason=reason))
    return checks


def _check_lossless(candidate: EvaluationReport) -> Check:
    found = candidate.lossless
    if found is None:
        return Check(name="lossless", outcome="inconclusive", reason="losslessness was not measured")
    reason = (
        f"{found.identical} of {found.prompts} greedy replies are those of the verifier alone, which agrees with "
        f"itself on {found.baseline_identical} of {found.baseline_prompts}"
    )
    if found.holds:
        return Check(name="lossless", outcome="pass", reason=reason)
    wide = [d for d in found.divergences if d.gap is None or d.gap > found.tie_gap]
    if wide:
        first = wide[0]
        size = "out of the best few" if first.gap is None else f"{first.gap:.2f} nats"
        reason += f"; {len(wide)} divergences are no ties (prompt {first.id}, token {first.position}: {size})"
    return Check(name="lossless", outcome="fail", reason=reason)


def _check_speed(candidate: EvaluationReport, config: GateConfig) -> list[Check]:
    """One check for each concurrency: a sign test over the rounds, whose two arms are a pair."""
    if not candidate.alternating:
        reason = "speed was not measured with alternating arms"
        return [Check(name="speed", outcome="inconclusive", reason=reason)]
    checks = []
    for speed in candidate.alternating:
        rounds, alpha = len(speed.rounds), 1 - config.confidence
        fast = sum(with_ / without >= config.min_speed_ratio for with_, without in speed.rounds)
        outcome: Outcome = "inconclusive"
        if sign_test(fast, rounds) <= alpha:
            outcome = "pass"
        elif sign_test(rounds - fast, rounds) <= alpha:
            outcome = "fail"
        reason = (
            f"{_speed_sentence(speed)}; {fast} of {rounds} rounds reach the least ratio, {config.min_speed_ratio:.2f}×"
        )
        if outcome == "inconclusive":
            reason += ": raise evaluation.speed.rounds to tell"
        checks.append(Check(name=f"speed at {speed.concurrency}", outcome=outcome, reason=reason))
    return checks


def _speed_sentence(speed: Speed) -> str:
    return (
        f"{speed.with_:.0f} tokens/s with the draft and {speed.without:.0f} without at {speed.concurrency} requests "
        f"at once: {speed.ratio:.2f}× ({speed.arms})"
    )


def _require_comparable(candidate: EvaluationReport, incumbent: EvaluationReport) -> None:
    ours, theirs = candidate.identity, incumbent.identity
    for name in ("verifier_fingerprint", "runtime_key", "prompts"):
        if getattr(ours, name) != getattr(theirs, name):
            raise EvaluationError(
                f"candidate and incumbent were measured on different {name.replace('_', ' ')}s "
                f"({getattr(ours, name)[:12]} and {getattr(theirs, name)[:12]})",
                mend="evaluate the incumbent again on this verifier, runtime and prompts",
            )
    if [row.id for row in candidate.per_prompt] != [row.id for row in incumbent.per_prompt] or not candidate.per_prompt:
        raise EvaluationError(
            "the per-prompt counts of candidate and incumbent do not pair up",
            mend="read both reports with read_report, from the directories that the evaluation wrote",
        )


def _compare(candidate: Sequence[PromptCounts], incumbent: Sequence[PromptCounts], config: GateConfig) -> Comparison:
    return compare_paired(
        _counts(candidate),
        _counts(incumbent),
        margin=config.margin,
        confidence=config.confidence,
        resamples=config.resamples,
        seed=config.seed,
    )


def _check_domains(
    candidate: Sequence[PromptCounts], incumbent: Sequence[PromptCounts], config: GateConfig
) -> tuple[list[Check], list[str]]:
    domains = sorted({row.domain for row in candidate})
    if len(domains) < 2:
        return [], []
    found = {
        name: _compare(
            [row for row in candidate if row.domain == name], [row for row in incumbent if row.domain == name], config
        )
        for name in domains
    }
    gated = [name for name in domains if found[name].prompts >= config.domain_min_prompts]
    notes = [
        f"domain {name} (report only, {found[name].prompts} prompts): ratio {found[name].ratio:.3f}"
        for name in domains
        if name not in gated
    ]
    inferior = holm([found[name].p_inferior for name in gated])
    noninferior = holm([found[name].p_noninferior for name in gated])
    checks = [
        _check_comparison(f"domain {name}", found[name], inferior[i], noninferior[i], config)
        for i, name in enumerate(gated)
    ]
    return checks, notes


def _check_comparison(
    name: str, comparison: Comparison, p_inferior: float, p_noninferior: float, config: GateConfig
) -> Check:
    alpha = 1 - config.confidence
    outcome: Outcome = "pass" if p_inferior <= alpha else "fail" if p_noninferior <= alpha else "inconclusive"
    reason = (
        f"{name}: AL is {comparison.ratio:.3f}× the incumbent's, bounds [{comparison.lower:.3f}, "
        f"{comparison.upper:.3f}], margin {1 - comparison.margin:.3f}, {comparison.prompts} prompts"
    )
    return Check(name=name, outcome=outcome, reason=reason)


def _next_prompts(
    candidate: EvaluationReport, comparison: Comparison | None, checks: Sequence[Check], config: GateConfig
) -> int | None:
    count = candidate.acceptance.prompts
    names = {check.name for check in checks if check.outcome == "inconclusive"}
    if any(name.startswith(("lossless", "served", "speed")) for name in names) or count >= config.max_prompts:
        return None
    wanted = max(config.min_prompts, 2 * count)
    if "incumbent" in names and comparison is not None:
        # the bound moves in by 1/√N: enough for the nearer side of the margin to clear it, had the ratio stayed
        distance = abs(comparison.ratio - (1 - comparison.margin))
        spread = (comparison.upper - comparison.lower) / 2
        if distance > 0:
            wanted = max(config.min_prompts, math.ceil(count * (1.2 * spread / distance) ** 2))
        else:
            wanted = config.max_prompts
    return min(config.max_prompts, max(wanted, count + 1))


def _counts(rows: Sequence[PromptCounts]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([row.drafts for row in rows]), np.array([row.accepted for row in rows])
