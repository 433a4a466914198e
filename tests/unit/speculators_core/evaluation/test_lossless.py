"""Divergences, loops, and the verdict over them."""

from __future__ import annotations

import pytest

from speculators_core.engine.client import Generation
from speculators_core.errors import EvaluationError
from speculators_core.evaluation.lossless import _divergence, first_divergence, judge, repeated_share
from speculators_core.evaluation.report import Divergence


def parted(count: int, gap: float | None = 0.1) -> list[Divergence]:
    return [Divergence(id=f"p{n}", position=n, gap=gap, top2_gap=gap) for n in range(count)]


@pytest.mark.parametrize(
    ("ours", "theirs", "position"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1, 2, 3], 2), ([], [], None), ([], [4], 0)],
)
def test_first_divergence(ours, theirs, position):
    assert first_divergence(ours, theirs) == first_divergence(theirs, ours) == position


def test_repeated_share_of_known_replies():
    assert repeated_share(list(range(50)), 5) == 0.0
    assert repeated_share([1, 2, 3], 5) == 0.0
    # ten times the same five tokens: 46 5-grams, 5 of them new
    assert repeated_share([1, 2, 3, 4, 5] * 10, 5) == pytest.approx(41 / 46)
    # the second half repeats the first: 96 5-grams of 100 tokens; those inside the second half, 46, are old
    assert repeated_share([*range(50), *range(50)], 5) == pytest.approx(46 / 96)


def test_as_many_ties_as_the_verifier_has_with_itself_are_lossless():
    found = judge(parted(4), parted(3), prompts=128, baseline_prompts=128, tie_gap=0.5)
    assert found.holds
    assert (found.identical, found.baseline_identical) == (124, 125)


def test_rounding_that_parts_most_replies_is_no_loss_where_every_divergence_is_a_tie():
    """Counts as they were seen in bfloat16 on a CPU: the verifier repeats itself on a quarter of its replies."""
    assert judge(parted(105), parted(97), prompts=128, baseline_prompts=128, tie_gap=0.5).holds
    assert not judge([*parted(104), *parted(1, 4.0)], parted(97), prompts=128, baseline_prompts=128, tie_gap=0.5).holds


def test_far_more_divergences_than_the_verifier_has_with_itself_are_not_lossless():
    found = judge(parted(30), parted(3), prompts=128, baseline_prompts=128, tie_gap=0.5)
    assert not found.holds
    assert found.shortfall_p < 0.001


@pytest.mark.parametrize("gap", [2.0, None])
def test_one_divergence_that_is_no_tie_is_not_lossless(gap):
    found = judge(parted(1, gap), [], prompts=128, baseline_prompts=128, tie_gap=0.5)
    assert not found.holds
    assert found.shortfall_p >= 0.05


def test_identical_replies_are_lossless_whatever_the_baseline_did():
    assert judge([], parted(50, None), prompts=128, baseline_prompts=128, tie_gap=0.0).holds


def answer(**best: float) -> Generation:
    named = {f"token_id:{token.removeprefix('t')}": value for token, value in best.items()}
    return Generation(
        id="p",
        prompt_token_ids=(1,),
        token_ids=(7,),
        text="",
        finish_reason="length",
        logprobs={"top_logprobs": [named]},
    )


def test_gap_is_between_the_two_tokens_that_were_chosen():
    found = _divergence(answer(t7=-0.5, t8=-0.75, t9=-3.0), 2, [1, 2, 7], [1, 2, 9])
    assert (found.gap, found.top2_gap) == (2.5, 0.25)
    assert _divergence(answer(t7=-0.5, t8=-0.75), 2, [1, 2, 7], [1, 2, 5]).gap is None
    assert _divergence(answer(t7=-0.5, t8=-0.75), 2, [1, 2], [1, 2, 7]).gap is None


def test_an_answer_of_another_form_is_an_error_that_says_so():
    generation = answer(t7=-0.5).model_copy(update={"logprobs": None})
    with pytest.raises(EvaluationError, match="log-probabilities"):
        _divergence(generation, 0, [1], [2])
