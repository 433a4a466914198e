"""Who may take traffic, by what the probe saw."""

from __future__ import annotations

from contextlib import closing

import pytest

from speculators_core.engine.client import EngineClient
from speculators_core.serving.config import ProbeConfig
from speculators_core.serving.probe import PROMPTS, ProbeResult, probe, refusal
from tests.unit.speculators_core.engine.test_client import Wire

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


def test_an_engine_that_answers_with_nothing_may_not() -> None:
    nothing = {"token_ids": [], "message": {"content": ""}, "prompt_logprobs": [None, {}]}
    with closing(Wire()) as wire, EngineClient(wire.url) as client:
        wire.reply = lambda number, path, body: (200, {"prompt_token_ids": [1, 2], "choices": [nothing]})
        found = probe(client, CONFIG)
    assert found == ProbeResult(tokens=0, worst_gap=0, al=None)
    for speculates in (True, False):
        told = refusal(found, CONFIG, speculates=speculates, registered_al=None)
        assert told == "it answers every prompt of the probe with nothing"


def test_there_are_as_many_prompts_as_the_config_allows() -> None:
    most = ProbeConfig.model_fields["prompts"].metadata[1].le
    assert len(PROMPTS) == most
