"""A candidate's page: everything is on it, nothing is fetched, and no text breaks out of its place."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import numpy as np
import pytest

from speculators_core.evaluation.candidate import (
    CandidateReport,
    Curve,
    PartLine,
    StageCost,
    arms_of,
    to_markdown,
)
from speculators_core.evaluation.page import to_html
from speculators_core.evaluation.records import Measurement
from speculators_core.evaluation.report import Identity
from tests.unit.speculators_core.evaluation.planted import planted_report, prompt_rates

SECTIONS = ("decision", "acceptance", "speed", "tied", "data", "training", "cost", "again")
VOID = {"meta", "link", "br", "img", "hr", "input"}


class Checker(HTMLParser):
    """Elements open and close in order; collects ids, texts and everything that a browser would fetch."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.fetched: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self._look(tag, attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._look(tag, attrs)

    def _look(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.ids.append(value)
            if name in ("src", "href", "xlink:href") and value and not value.startswith("#"):
                self.fetched.append(value)
        if tag in ("script", "link", "iframe", "object"):
            self.fetched.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> inside {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def ngram(drafts: int) -> Measurement:
    identity = Identity(draft="ngram", verifier_fingerprint="f", runtime_key="r", vllm="0.32.0", prompts="p")
    return Measurement(
        identity=identity,
        k=3,
        count=100,
        max_new_tokens=128,
        concurrency=8,
        drafts=drafts,
        draft_tokens=3 * drafts,
        accepted=2 * drafts,
        accepted_per_position=(drafts, drafts // 2, drafts // 2),
        tokens=1000,
        seconds=10.0,
        engine_seconds=1.0,
        divergences=None,
    )


def report(**changes: object) -> CandidateReport:
    generator = np.random.default_rng(3)
    rates = prompt_rates(120, 0.5, generator)
    candidate, incumbent = planted_report(rates, generator), planted_report(rates * 0.9, generator)
    assert candidate.speed is not None
    values: dict[str, object] = {
        "model": "chat",
        "version": "7",
        "recipe": "demo",
        "algorithm": "some-draft",
        "verifier": "org/<verifier> & co",
        "vllm": "0.32.0",
        "outcome": "pass",
        "reasons": ("pass: all <b>bold</b>",),
        "prompts": 120,
        "k": 3,
        "measured": candidate.measured_in_words,
        "arms": arms_of(candidate, incumbent, ngram(100), labels=("version 7", "version 6 (serves)")),
        "speeds": (candidate.speed,),
        "parts": (
            PartLine(name="weights", here="a" * 64, incumbent="b" * 64, details=("model.safetensors changed",)),
            PartLine(name="chat_template", here="c" * 64, incumbent="c" * 64),
            PartLine(name="runtime", here="d" * 64, incumbent=None),
        ),
        "data_card": (("rows", "1,060"), ("tokens", "204,523")),
        "curves": (Curve(name="training loss", points=((10, 5.0), (20, 3.0))),),
        "stages": (
            StageCost(name="capture", seconds=328.6, num_bytes=944_282_691, tokens=204_523, price=0.41),
            StageCost(name="train", seconds=None, num_bytes=10),
        ),
        "command": "draftsmith retrain demo.yaml",
        "facts": (("draft", "e" * 64),),
    }
    return CandidateReport.model_validate({**values, **changes})


def checked(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == []
    return checker


def test_the_page_is_whole_self_contained_and_escaped():
    page = to_html(report())
    found = checked(page)
    assert found.fetched == []
    assert not re.search(r"url\((?!#)|@import", page)
    assert len(found.ids) == len(set(found.ids)), "ids are unique on the page"
    assert set(SECTIONS) <= set(found.ids)
    assert {"chart-domains", "chart-positions", "chart-speed", "chart-training"} <= set(found.ids)
    references = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', page))
    assert references <= set(found.ids), "every clip path that a chart uses is there"
    text = "".join(found.text)
    for words in (
        "org/<verifier> & co",
        "pass: all <b>bold</b>",
        "version 6 (serves)",
        "model.safetensors changed",
        "944,282,691",
        "0.41",
        "draftsmith retrain demo.yaml",
        "100 drafts in 800 steps",
    ):
        assert words in text, words
    assert "<b>bold" not in page


def test_the_same_report_is_the_same_page():
    assert to_html(report()) == to_html(report())


def test_what_was_not_measured_is_said():
    generator = np.random.default_rng(3)
    alone = planted_report(prompt_rates(120, 0.5, generator), generator).model_copy(
        update={"speed": None, "alternating": ()}
    )
    bare = report(
        arms=arms_of(alone, None, None, labels=("version 7", "incumbent")), speeds=(), curves=(), stages=(), parts=()
    )
    for text in ("".join(checked(to_html(bare)).text), to_markdown(bare)):
        assert "not measured: add `baselines: [ngram]`" in text
        assert "nothing else serves" in text
        assert "speed was not measured" in text
    assert "No curves were recorded" in to_html(bare)


def test_ngrams_own_al_and_its_tokens_a_step_are_told_apart():
    arm = next(arm for arm in report().arms if arm.name == "n-gram")
    assert arm.al == pytest.approx(3.0)
    assert arm.tokens_per_step == pytest.approx(1000 / 800)
    none = arms_of(planted_report(np.full(10, 0.5), np.random.default_rng(0)), None, ngram(0), labels=("a", "b"))[2]
    assert (none.al, none.tokens_per_step) == (None, 1.0)


def test_markdown_tables_hold_their_shape():
    text = to_markdown(report(data_card=(("odd | name", "two\nlines"),)))
    for block in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        counts = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
        assert len(counts) == 1, block
