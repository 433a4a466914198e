"""Counted metrics: pairs of sum and count, which pool exactly over rows, micro-batches and ranks."""

from __future__ import annotations

from speculators_core.metrics.acceptance import unrolled_metrics

__all__ = ["unrolled_metrics"]
