"""With `compat` our numbers are the peer's. Cases come from GOLDEN_DIR (several directories, separated as in PATH)."""

from __future__ import annotations

import re

import pytest
import torch

from tests.parity.golden import GoldenCase, cases
from tests.parity.golden_dflash import run_dflash
from tests.parity.golden_dflash2 import run_dflash2
from tests.parity.golden_dspark import run_dspark
from tests.parity.golden_eagle3 import run_eagle3
from tests.parity.golden_mtp import run_mtp
from tests.parity.golden_peagle import run_peagle
from tests.parity.golden_xpress import run_xpress

COUNTS = re.compile(r"(_acc(_\d+)?|^accuracy|^eal)$")
"""Metrics that count tokens: they are equal or wrong."""

RUNNERS = {
    "dflash": run_dflash,
    "dflash2": run_dflash2,
    "dspark": run_dspark,
    "eagle3": run_eagle3,
    "mtp": run_mtp,
    "peagle": run_peagle,
    "xpress": run_xpress,
}


@pytest.mark.parametrize("case", cases(), ids=lambda case: f"{case.directory.name}/{case.name}")
def test_loss_metrics_and_gradients_are_the_peers(case: GoldenCase) -> None:
    if case.algorithm not in RUNNERS:
        pytest.skip(f"{case.algorithm} is not built")
    result, gradients = RUNNERS[case.algorithm](case)

    assert float(result.loss.detach()) == pytest.approx(case.summary["loss"], abs=1e-5)
    assert float(result.loss.detach()) == pytest.approx(float(case.tensors()["out.loss"]), abs=1e-5)

    expected = case.summary["metrics_sum_total"]
    assert set(result.metrics) == set(expected)
    for name, (total, count) in expected.items():
        counted = result.metrics[name]
        if COUNTS.search(name):
            assert (counted.sum, counted.count) == (total, count), name
        else:
            assert counted.sum == pytest.approx(total, rel=1e-5), name
            assert counted.count == pytest.approx(count, rel=1e-5), name

    assert set(gradients) == set(case.summary["grad_norms"])
    for name, norm in case.summary["grad_norms"].items():
        assert float(gradients[name].norm()) == pytest.approx(norm, abs=1e-4, rel=1e-4), name


def test_the_numbers_move_when_the_window_does() -> None:
    """A golden test that would pass with the wrong mask proves nothing."""
    case = next((c for c in cases() if c.algorithm == "eagle3" and c.summary["sliding_window"]), None)
    if case is None:
        pytest.skip("no windowed case at hand")
    narrowed = GoldenCase(
        case.name, case.directory, {**case.summary, "sliding_window": case.summary["sliding_window"] - 1}
    )
    result, _ = run_eagle3(narrowed)
    assert abs(float(result.loss.detach()) - case.summary["loss"]) > 1e-5
    assert torch.isfinite(result.loss)
