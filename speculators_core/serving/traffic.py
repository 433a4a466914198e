"""What an engine and its place in the proxy counted: readings, and the traffic between two of them."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

from speculators_core.engine.metrics import SpecDecodeCounters, parse_prometheus, read_spec_decode


@dataclass(frozen=True)
class Traffic:
    """Counts; running totals of a reading, or what happened between two.

    decode_s, decode_tokens: of finished requests, the time from first to last token and the tokens after the first ·
    looks, crowded: looks at the engine, and of these with requests that waited for a place.
    """

    spec: SpecDecodeCounters = field(default_factory=SpecDecodeCounters)
    requests: int = 0
    errors: int = 0
    finished: int = 0
    decode_s: float = 0.0
    decode_tokens: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    looks: int = 0
    crowded: int = 0

    def __sub__(self, earlier: Traffic) -> Traffic:
        """What happened between two readings."""
        return Traffic(
            self.spec - earlier.spec,
            self.requests - earlier.requests,
            self.errors - earlier.errors,
            self.finished - earlier.finished,
            self.decode_s - earlier.decode_s,
            self.decode_tokens - earlier.decode_tokens,
            self.prompt_tokens - earlier.prompt_tokens,
            self.generated_tokens - earlier.generated_tokens,
            self.looks - earlier.looks,
            self.crowded - earlier.crowded,
        )

    @property
    def tpot(self) -> float:
        """Seconds per output token after the first; NaN where no request with two tokens or more finished."""
        return self.decode_s / self.decode_tokens if self.decode_tokens else math.nan

    @property
    def error_rate(self) -> float:
        """Failed share of the requests; 0 where there was none."""
        return self.errors / self.requests if self.requests else 0.0


@dataclass(frozen=True)
class ProxyCounts:
    """What the proxy counted of one engine: requests that got an answer or failed, and those that failed."""

    requests: int = 0
    errors: int = 0


def read_traffic(metrics: str, proxy: ProxyCounts, before: Traffic) -> Traffic:
    """An engine's running totals from its Prometheus text, with the proxy's; `before` is the reading ahead of it."""
    totals: dict[str, float] = defaultdict(float)
    for sample in parse_prometheus(metrics):
        totals[sample.name] += sample.value
    finished = int(totals["vllm:request_generation_tokens_count"])
    return Traffic(
        spec=read_spec_decode(metrics),
        requests=proxy.requests,
        errors=proxy.errors,
        finished=finished,
        decode_s=totals["vllm:request_decode_time_seconds_sum"],
        decode_tokens=int(totals["vllm:request_generation_tokens_sum"]) - finished,
        prompt_tokens=int(totals["vllm:prompt_tokens_total"]),
        generated_tokens=int(totals["vllm:generation_tokens_total"]),
        looks=before.looks + 1,
        crowded=before.crowded + (totals["vllm:num_requests_waiting"] > 0),
    )
