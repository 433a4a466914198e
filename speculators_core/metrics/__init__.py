"""Counted metrics: pairs of sum and count, which pool exactly over rows, micro-batches and ranks."""
