"""Whether speculation pays on the traffic at hand: doubted from counts, then tried, never guessed.

Under traffic that makes it doubtful (`speculation_doubt`) the verifier alone takes over for a trial, and the faster way
stays. Alone goes back to drafting once the traffic is no longer doubtful. Times per output token are compared between
the last span with drafts and the first without.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from speculators_core.serving.config import AutoDisableConfig
from speculators_core.serving.decisions import is_faster_alone, speculation_doubt
from speculators_core.serving.traffic import Traffic


@dataclass(frozen=True)
class Advice:
    """report: say it · alone: let the verifier answer alone, on trial · keep: it won · drafting: draft again."""

    do: Literal["report", "alone", "keep", "drafting"]
    reason: str


class Economy:
    """Looks at one version's traffic, span by span; a new version gets a new one."""

    def __init__(self, rules: AutoDisableConfig, min_requests: int) -> None:
        self._rules, self._min_requests = rules, min_requests
        self._mark: tuple[float, bool, Traffic] | None = None
        self._quiet_until = 0.0
        self._drafting: Traffic | None = None
        """The last span with drafts, while a trial runs."""

    def look(self, totals: Traffic, *, speculates: bool, now: float) -> Advice | None:
        """What to do, by the running totals of the engine that serves; None: go on.

        Args:
            now: monotonic seconds.
        """
        if self._rules.mode == "off":
            return None
        if self._mark is None or self._mark[1] != speculates:
            self._mark = now, speculates, totals
        began, _, before = self._mark
        if now < began + self._rules.sustained_s:
            return None
        self._mark = now, speculates, totals
        span = totals - before
        return self._drafts(span, now) if speculates else self._alone(span, now)

    def _drafts(self, span: Traffic, now: float) -> Advice | None:
        doubt = speculation_doubt(span, self._rules)
        if doubt is None or now < self._quiet_until:
            return None
        self._quiet_until = now + self._rules.retry_s
        if self._rules.mode == "report":
            return Advice("report", f"speculation may cost more than it gives: {doubt}")
        self._drafting = span
        return Advice("alone", doubt)

    def _alone(self, span: Traffic, now: float) -> Advice | None:
        if self._drafting is None:  # the trial was won
            if span.finished >= self._min_requests and speculation_doubt(span, self._rules) is None:
                return Advice("drafting", "the traffic that spoke against it is over")
            return None
        faster = is_faster_alone(span, self._drafting, self._min_requests)
        if faster is None:
            return None
        times = f"{1000 * span.tpot:.1f} ms per output token against {1000 * self._drafting.tpot:.1f} with drafts"
        self._drafting = None
        return Advice("keep" if faster else "drafting", times)
