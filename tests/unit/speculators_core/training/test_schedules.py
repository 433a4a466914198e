from __future__ import annotations

import pytest

from speculators_core.training.config import ScheduleConfig
from speculators_core.training.schedules import learning_rate_factor


@pytest.mark.parametrize("kind", ["linear", "cosine", "none"])
def test_warmup_rises_from_above_zero_to_the_peak(kind: str) -> None:
    config = ScheduleConfig.model_validate({"kind": kind, "warmup_steps": 4})
    factors = [learning_rate_factor(config, step, 20) for step in range(5)]
    assert factors == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


@pytest.mark.parametrize(("kind", "middle"), [("linear", 0.55), ("cosine", 0.55), ("none", 1.0)])
def test_decay_passes_the_middle_and_ends_at_the_final_factor(kind: str, middle: float) -> None:
    config = ScheduleConfig.model_validate({"kind": kind, "warmup_steps": 0, "final_factor": 0.1})
    assert learning_rate_factor(config, 10, 20) == pytest.approx(middle)
    assert learning_rate_factor(config, 20, 20) == pytest.approx(1.0 if kind == "none" else 0.1)
    assert learning_rate_factor(config, 900, 20) == learning_rate_factor(config, 20, 20)


def test_warmup_share_is_of_the_whole_run() -> None:
    config = ScheduleConfig(kind="none", warmup_share=0.1)
    assert learning_rate_factor(config, 9, 100) < 1.0
    assert learning_rate_factor(config, 10, 100) == 1.0
