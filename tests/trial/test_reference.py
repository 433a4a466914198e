"""The reference loop counts what the engine counts, on the real model: AL within 2 %.

The two round differently, so some replies part at a near tie, and what is accepted behind it differs by chance. Paired
over prompts, that chance is known: a difference counts where it is larger.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from speculators_core.evaluation.report import EvaluationReport, read_report
from speculators_core.evaluation.statistics import compare_paired
from tests.engine.loop import run

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
    theirs, ours = (measured(kind, by, home).per_prompt for by in ("engine", "reference"))
    assert [prompt.id for prompt in ours] == [prompt.id for prompt in theirs]
    columns = [([prompt.drafts for prompt in side], [prompt.accepted for prompt in side]) for side in (ours, theirs)]
    found = compare_paired(*columns, margin=0.02, confidence=0.975, resamples=10_000, seed=0)
    counts = [[(prompt.drafts, prompt.accepted) for prompt in side] for side in (ours, theirs)]
    alike = sum(one == other for one, other in zip(*counts, strict=True)) / found.prompts
    print(f"{kind}: AL ratio {found.ratio:.4f} [{found.lower:.4f}, {found.upper:.4f}], {alike:.0%} counted alike")
    assert abs(found.ratio - 1) < 0.02 or found.lower < 1 < found.upper
    assert found.upper - found.lower < 0.08, "too few prompts to tell"
    assert alike > 0.3, "where replies are the same, so are the counts"
    assert sum(columns[1][1]) > 100, "or there was nothing to compare"


def measured(kind: str, by: str, home: Path) -> EvaluationReport:
    algorithm, k = KINDS[kind]
    asked = {**SETTINGS, "algorithm": algorithm, "evaluation.k": k, "evaluation.measured_by": by}
    done = run(home, "evaluate", "--json", **asked)
    assert done.returncode == 0, done.stderr[-3000:]
    report = read_report(Path(json.loads(done.stdout)[-1]["ref"]["uri"]) / "data")
    assert report.measured_by == by
    return report
