"""Who may take traffic, by what the probe saw."""

from __future__ import annotations

import pytest

from speculators_core.serving.config import ProbeConfig
from speculators_core.serving.probe import PROMPTS, ProbeResult, refusal

CONFIG = ProbeConfig()


def refused(
    *, gap: float = 0.1, al: float | None = 1.5, speculates: bool = True, registered: float | None = 1.6
) -> str:
    found = ProbeResult(tokens=100, worst_gap=gap, al=al)
    return refusal(found, CONFIG, speculates=speculates, registered_al=registered) or ""


def test_what_was_measured_and_rounds_no_more_than_a_tie_may() -> None:
    assert refused() == "" and refused(gap=CONFIG.tie_gap) == "" and refused(registered=None) == ""


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ({"gap": 0.6}, "not lossless"),
        ({"al": None}, "drafts nothing"),
        ({"al": 0.95}, "0.950 on the probe is less than 60% of the 1.600"),
    ],
)
def test_what_it_must_not_show(result: dict[str, float | None], words: str) -> None:
    assert words in refused(**result)  # type: ignore[arg-type]


def test_the_verifier_alone_drafts_nothing_and_may() -> None:
    assert refused(al=None, speculates=False) == ""
    assert "not lossless" in refused(gap=2.0, al=None, speculates=False)


def test_there_are_as_many_prompts_as_the_config_allows() -> None:
    most = ProbeConfig.model_fields["prompts"].metadata[1].le
    assert len(PROMPTS) == most
