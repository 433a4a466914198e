"""Losses of a draft against its verifier, and their fused evaluation."""

from __future__ import annotations

from speculators_core.losses.closed_form import LOSSES, Distribution, Pair
from speculators_core.losses.fused import DEFAULT_CHUNK, UnrolledLoss, UnrolledTargets, unrolled_loss
from speculators_core.losses.terms import LossTerm, parse_loss

__all__ = [
    "DEFAULT_CHUNK",
    "LOSSES",
    "Distribution",
    "LossTerm",
    "Pair",
    "UnrolledLoss",
    "UnrolledTargets",
    "parse_loss",
    "unrolled_loss",
]
