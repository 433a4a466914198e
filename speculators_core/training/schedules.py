"""Learning rates as pure functions of the step, so that a schedule has no state to save."""

from __future__ import annotations

import math

from speculators_core.training.config import ScheduleConfig


def warmup_steps(config: ScheduleConfig, total_steps: int) -> int:
    """Steps of the warm-up: as configured, else the configured share of the run."""
    if config.warmup_steps is not None:
        return config.warmup_steps
    return int(config.warmup_share * total_steps)


def learning_rate_factor(config: ScheduleConfig, step: int, total_steps: int) -> float:
    """Factor of the peak rate for the optimiser step with 0-based index `step`.

    Rises linearly over the warm-up (the first step is already above zero), then stays ("none"), or falls to
    `final_factor` at the last step by a line or half a cosine.
    """
    warmup = warmup_steps(config, total_steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if config.kind == "none":
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    shape = 1.0 - progress if config.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.final_factor + (1.0 - config.final_factor) * shape
