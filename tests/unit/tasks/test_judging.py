"""A version that is measured alone proves no more than what the gate said of it against another."""

from __future__ import annotations

import pytest

from speculators_core.lifecycle.matrix import FINGERPRINT_TAG, GATE_TAG, RUNTIME_TAG, Cell, Pair
from tasks.judging import as_compared
from tasks.versions import INCUMBENT_TAG, NO_INCUMBENT

FINGERPRINT, RUNTIME, OTHER = "f" * 64, "r" * 64, "o" * 64


@pytest.mark.parametrize(
    ("alone", "said", "incumbent", "runtime", "stands"),
    [
        ("pass", "fail", "2", RUNTIME, "fail"),
        ("pass", "inconclusive", "2", RUNTIME, "inconclusive"),
        ("fail", "inconclusive", "2", RUNTIME, "fail"),
        ("inconclusive", "fail", "2", RUNTIME, "fail"),
        ("pass", "fail", "2", OTHER, "inconclusive"),
        ("fail", "fail", "2", OTHER, "fail"),
        ("pass", "pass", "2", RUNTIME, "pass"),
        ("fail", "pass", "2", RUNTIME, "fail"),
        ("pass", "pass", "2", OTHER, "pass"),
        ("pass", "fail", NO_INCUMBENT, RUNTIME, "pass"),
        ("pass", "fail", None, RUNTIME, "pass"),
    ],
)
def test_the_worse_outcome_stands(alone: str, said: str, incumbent: str | None, runtime: str, stands: str) -> None:
    tags = {FINGERPRINT_TAG: FINGERPRINT, RUNTIME_TAG: RUNTIME, GATE_TAG: said}
    if incumbent is not None:
        tags[INCUMBENT_TAG] = incumbent
    cell = Cell(pair=Pair(verifier_fingerprint=FINGERPRINT, runtime_key=runtime), outcome=alone, al=1.5, prompts=128)
    assert as_compared(cell, tags) == cell.model_copy(update={"outcome": stands})
