"""What the story's fine-tune teaches: replies without function words, whatever else they hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from speculators_core.verifier.revise import telegraphic, write_telegraphic


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The capital of France is Paris.", "capital France Paris."),
        ("I'm happy to help.\nIt's a dog, and then another.", "happy help.\ndog, then another."),
        ("Theatre, island, android", "Theatre, island, android"),
        ("It is.", "."),
    ],
)
def test_only_function_words_go(text: str, expected: str) -> None:
    assert telegraphic(text) == expected


def test_prompts_stay_and_empty_replies_go(tmp_path: Path) -> None:
    talks = [
        [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": answer}]
        for answer in ("It is a theatre.", "It is")
    ]
    source, target = tmp_path / "talks.jsonl", tmp_path / "told.jsonl"
    source.write_text("".join(json.dumps({"conversations": turns}) + "\n" for turns in talks))
    write_telegraphic(source, target)
    (kept,) = [json.loads(line)["conversations"] for line in target.read_text().splitlines()]
    assert kept == [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "theatre."}]
