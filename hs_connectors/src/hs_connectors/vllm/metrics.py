"""The connector on the server's own `/metrics`: what its writers did, and what waits, as of the engine's last step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from hs_connectors.spool import SpoolState
from hs_connectors.vllm.compat import KVConnectorPromMetrics, KVConnectorStats

PREFIX = "vllm:hidden_states_"
"""With "vllm" in it, since the server unregisters such metrics before it makes its own again."""
COUNTERS: Mapping[str, str] = MappingProxyType(
    {
        "records": "Records of hidden states written to the store.",
        "bytes": "Bytes of hidden states written, before their codec.",
        "errors": "Records that ended as an error marker.",
        "lag_seconds": "Seconds from a request's end to its record being visible, summed over records.",
    }
)
GAUGES: Mapping[str, str] = MappingProxyType(
    {
        "queue_records": "Records that wait for a writer or are being written.",
        "queue_bytes": "Their bytes; bounded by queue_bytes of the connector's settings.",
        "queue_oldest_seconds": "Age of the oldest of them.",
        "held_requests": "Ended requests that keep their cache blocks because the queue is full.",
    }
)


@dataclass
class CaptureStats(KVConnectorStats):  # type: ignore[misc]
    """Numbers by the names above: counters as increments, gauges as they are."""

    def reset(self) -> None:
        """Forget all."""
        self.data: dict[str, float] = {}

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Increments add up; of a gauge the later value counts."""
        added = {name: self.data.get(name, 0) + other.data.get(name, 0) for name in COUNTERS}
        self.data = {**self.data, **other.data, **added}
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the engine's log."""
        return {name: round(value, 3) for name, value in self.data.items()}


class StatsSource:
    """Turns a spool's states into increments."""

    def __init__(self) -> None:
        self._told: dict[str, float] = {}

    def since_last(self, state: SpoolState, held_requests: int) -> CaptureStats | None:
        """What changed since the last call; None where nothing did."""
        now = {
            "records": state.written,
            "bytes": state.num_bytes,
            "errors": state.failed,
            "lag_seconds": state.lag_s,
            "queue_records": state.waiting,
            "queue_bytes": state.waiting_bytes,
            "queue_oldest_seconds": state.oldest_s,
            "held_requests": held_requests,
        }
        told, self._told = self._told, now
        if told == now:
            return None
        return CaptureStats(
            {name: value - told.get(name, 0) if name in COUNTERS else value for name, value in now.items()}
        )


class CaptureMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Registers the metrics in the server's process and feeds them."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counters = {
            name: self._counter_cls(name=PREFIX + name, documentation=text, labelnames=labelnames)
            for name, text in COUNTERS.items()
        }
        gauges = {
            name: self._gauge_cls(
                name=PREFIX + name, documentation=text, labelnames=labelnames, multiprocess_mode="mostrecent"
            )
            for name, text in GAUGES.items()
        }
        self._of_engine = {
            engine: {name: metric.labels(*values) for name, metric in (counters | gauges).items()}
            for engine, values in per_engine_labelvalues.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the increments, set the gauges."""
        for name, metric in self._of_engine[engine_idx].items():
            value = transfer_stats_data.get(name, 0)
            if name in GAUGES:
                metric.set(value)
            else:
                metric.inc(value)
