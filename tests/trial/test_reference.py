"""The reference loop counts what the engine counts, on the real model: AL within 2 %."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from loop import run

pytestmark = [pytest.mark.engine, pytest.mark.trial]

KINDS = {
    "eagle3": ("{kind: eagle3, ttt_steps: 3}", "3"),
    "peagle": ("{kind: peagle, layers: 1, num_depths: 4}", "4"),
    "dflash": ("{kind: dflash, layers: 1, block_size: 8}", "7"),
}
SETTINGS = {
    "data.max_rows": "600",
    "data.evaluation_prompts": "100",
    "draft_vocabulary": "8192",
    "training.max_steps": "100",
    "evaluation.max_prompts": "100",
    "evaluation.max_new_tokens": "64",
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One state root, so that all three learn from the same capture."""
    return tmp_path_factory.mktemp("home")


@pytest.mark.parametrize("kind", KINDS)
def test_both_ways_to_measure_agree(kind: str, home: Path) -> None:
    engine, reference = (measured(kind, by, home) for by in ("engine", "reference"))
    assert reference["al"] == pytest.approx(engine["al"], rel=0.02)
    assert reference["per_position"] == pytest.approx(engine["per_position"], abs=0.03)
    assert engine["accepted"] > 100, "or there was nothing to compare"


def measured(kind: str, by: str, home: Path) -> dict[str, Any]:
    algorithm, k = KINDS[kind]
    asked = {**SETTINGS, "algorithm": algorithm, "evaluation.k": k, "evaluation.measured_by": by}
    done = run(home, "evaluate", "--json", **asked)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads(done.stdout)[-1]["summary"]
    assert summary["measured_by"] == by
    found: dict[str, Any] = summary["acceptance"]
    return found
