from __future__ import annotations

import pytest
import torch

from hs_connectors.probe import ProbedStep
from speculators_core.engine.metrics import SpecDecodeCounters
from speculators_core.evaluation.parity import Ladder, Rung, acceptance_rung

COUNTED = SpecDecodeCounters(drafts=3, draft_tokens=6, accepted=3, accepted_per_position=(2, 1))


def step(request: str, fed: list[int], drafted: list[int]) -> ProbedStep:
    ids = torch.tensor(fed)
    return ProbedStep(request, 0, ids, ids, torch.empty(0), torch.tensor(drafted), torch.empty(0))


STEPS = [
    step("a", [1, 2, 3, 4, 5, 6, 7], [8, 9]),  # a chunk of the prompt: what follows was never drafted for
    step("b", [1], [2, 3]),
    step("a", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [12, 13]),  # 12, 13 are written next: both accepted
    step("b", [1, 2, 9], [7, 7]),  # 2 was accepted, 3 was not
    step("a", [*range(1, 15)], [1, 1]),
    step("b", [1, 2, 9, 8], [1, 1]),  # nothing accepted
]


def test_the_same_choices_predict_what_was_accepted() -> None:
    rung = acceptance_rung(STEPS, [one.drafted for one in STEPS], COUNTED)
    assert rung.outcome == "holds"
    assert rung.text == "predicted 2.000, served 2.000 over 3 drafts; the engine counted 2.000 over all 3"


@pytest.mark.parametrize(
    ("index", "ours", "predicted"), [(2, [12, 0], "1.667"), (2, [0, 13], "1.333"), (3, [8, 7], "2.333")]
)
def test_other_choices_predict_something_else(index: int, ours: list[int], predicted: str) -> None:
    choices = [one.drafted for one in STEPS]
    choices[index] = torch.tensor(ours)
    rung = acceptance_rung(STEPS, choices, COUNTED)
    assert rung.outcome == "breaks" and f"predicted {predicted}, served 2.000" in rung.text


def test_a_single_step_tells_nothing() -> None:
    assert acceptance_rung(STEPS[:1], [STEPS[0].drafted], COUNTED).outcome == "skipped"


def test_the_first_rung_that_breaks_is_named() -> None:
    outcomes = ("holds", "skipped", "breaks", "breaks")
    rungs = tuple(Rung(name=str(n), outcome=outcome, text="") for n, outcome in enumerate(outcomes))
    ladder = Ladder(draft="d", algorithm="a", vllm="v", rungs=rungs, logits=None)
    assert ladder.broken is not None and ladder.broken.name == "2"
    assert ladder.model_copy(update={"rungs": rungs[:2]}).broken is None
