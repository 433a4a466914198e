"""Counters of speculative decoding, read from a server's Prometheus text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

_LINE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?$")
_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:\\.|[^"\\])*)"')
_ESCAPES = {"\\n": "\n", '\\"': '"', "\\\\": "\\"}


class Sample(NamedTuple):
    """One line of the exposition format."""

    name: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True)
class SpecDecodeCounters:
    """Running totals of a server, over all its engines; subtract two readings to get a span's own.

    drafts: drafting steps · draft_tokens: tokens proposed · accepted: of these accepted ·
    accepted_per_position: accepted at draft position 1, 2, …
    """

    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    accepted_per_position: tuple[int, ...] = ()

    def __sub__(self, earlier: SpecDecodeCounters) -> SpecDecodeCounters:
        """What happened between two readings."""
        length = max(len(self.accepted_per_position), len(earlier.accepted_per_position))
        mine, theirs = (
            counters.accepted_per_position + (0,) * (length - len(counters.accepted_per_position))
            for counters in (self, earlier)
        )
        return SpecDecodeCounters(
            self.drafts - earlier.drafts,
            self.draft_tokens - earlier.draft_tokens,
            self.accepted - earlier.accepted,
            tuple(a - b for a, b in zip(mine, theirs, strict=True)),
        )

    @property
    def acceptance_length(self) -> float:
        """AL = 1 + accepted / drafts; NaN when nothing was drafted."""
        return 1 + self.accepted / self.drafts if self.drafts else float("nan")

    @property
    def acceptance_per_position(self) -> tuple[float, ...]:
        """Share of drafting steps whose draft was accepted up to and including each position."""
        return tuple(accepted / self.drafts for accepted in self.accepted_per_position) if self.drafts else ()


def parse_prometheus(text: str) -> Iterator[Sample]:
    """Samples of a Prometheus text exposition; comments and lines that are none are skipped."""
    for line in text.splitlines():
        if line.startswith("#") or not (match := _LINE.match(line.strip())):
            continue
        try:
            value = float(match.group(3))
        except ValueError:
            continue
        labels = {
            key: re.sub(r"\\.", lambda escape: _ESCAPES.get(escape.group(), escape.group()), value)
            for key, value in _LABEL.findall(match.group(2) or "")
        }
        yield Sample(match.group(1), labels, value)


def read_spec_decode(text: str) -> SpecDecodeCounters:
    """Counters from `/metrics`: names with `_total` (`_created` lines are timestamps), summed over engines."""
    totals: dict[str, int] = {}
    per_position: dict[int, int] = {}
    for sample in parse_prometheus(text):
        if not (sample.name.startswith("vllm:spec_decode_num_") and sample.name.endswith("_total")):
            continue
        name = sample.name.removeprefix("vllm:spec_decode_num_").removesuffix("_total")
        if name == "accepted_tokens_per_pos":
            position = int(sample.labels["position"])
            per_position[position] = per_position.get(position, 0) + int(sample.value)
        else:
            totals[name] = totals.get(name, 0) + int(sample.value)
    return SpecDecodeCounters(
        drafts=totals.get("drafts", 0),
        draft_tokens=totals.get("draft_tokens", 0),
        accepted=totals.get("accepted_tokens", 0),
        accepted_per_position=tuple(per_position.get(i, 0) for i in range(max(per_position, default=-1) + 1)),
    )
