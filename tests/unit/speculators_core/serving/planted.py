"""Traffic with planted rates."""

from __future__ import annotations

from typing import Any

import numpy as np

from speculators_core.engine.metrics import SpecDecodeCounters
from speculators_core.serving.traffic import Traffic

K = 3
_ALIKE = 30  # replies differ so much that the variance of the mean is some 5 times that of independent drafts


def counted(al: float, drafts: int, *, seed: int = 0, steps_a_reply: int = 80) -> SpecDecodeCounters:
    """Drafts of replies whose acceptance differs from reply to reply around the one that gives this AL."""
    generator = np.random.default_rng(seed)
    rate = min(max(_rate(al), 1e-9), 1 - 1e-9)
    replies = -(-drafts // steps_a_reply)
    rates = generator.beta(_ALIKE * rate, _ALIKE * (1 - rate), size=replies).repeat(steps_a_reply)[:drafts]
    accepted = (generator.random((drafts, K)) < rates[:, None]).cumprod(axis=1)
    return SpecDecodeCounters(drafts, K * drafts, int(accepted.sum()), tuple(int(n) for n in accepted.sum(axis=0)))


def _rate(al: float) -> float:
    """Acceptance rate r of a position with r + r² + r³ = AL − 1."""
    rates = np.linspace(0, 1, 10_001)
    return float(np.interp(al - 1, rates + rates**2 + rates**3, rates))


def traffic(al: float = 1.6, drafts: int = 4000, *, seed: int = 0, tpot: float = 0.02, **counts: Any) -> Traffic:
    """Healthy traffic of a hundred requests, but for what is named."""
    values = {"requests": 100, "finished": 100, "decode_tokens": 5000, "decode_s": 5000 * tpot, **counts}
    return Traffic(spec=counted(al, drafts, seed=seed), **values)
