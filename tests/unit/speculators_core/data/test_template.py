"""A chat template is a program by somebody else: what is wrong with it is said of it, not of the data."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from speculators_core.data.check import opening_prompts
from speculators_core.data.config import DataConfig, RegenerationConfig
from speculators_core.data.conversations import normalise
from speculators_core.data.prepare import prepare
from speculators_core.data.regenerate import regenerate
from speculators_core.data.template import ChatTemplate
from speculators_core.errors import DataError, VerifierError
from speculators_core.verifier.facts import read_facts

from .conftest import CHATML

FAILING = {
    "{{ 1/0 }}": "ZeroDivisionError",
    "{% for i in range(10**12) %}x{% endfor %}": "OverflowError",
    "{{ '{0}{1}'.format('a') }}": "IndexError",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "RecursionError",
    "{{ 'a' * (10**15) }}": "MemoryError",
    "{{ '\\ud800' }}": "UnicodeEncodeError",
    "{{ messages.nothing.at_all }}": "has no attribute 'nothing'",
    "{{ raise_exception('not today') }}": "not today",
}
CHAT = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]


def write(path: Path, count: int) -> str:
    chats = [[{"role": "user", "content": f"{number}?"}, CHAT[1]] for number in range(count)]
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in chats))
    return str(path)


@pytest.mark.parametrize("template", FAILING)
def test_a_failure_is_a_refusal_in_its_own_words(make_verifier: Callable[..., Path], template: str) -> None:
    verifier = make_verifier(template)
    with pytest.raises(DataError, match=re.escape(FAILING[template])):
        ChatTemplate.load(verifier).text(CHAT)


def test_it_costs_the_conversation_and_not_the_rest(make_verifier: Callable[..., Path], tmp_path: Path) -> None:
    verifier = make_verifier("{% if messages[0]['content'] == '0?' %}{{ 1/0 }}{% endif %}" + CHATML)
    source = write(tmp_path / "chats.jsonl", 3)
    report = prepare(DataConfig(sources=(source,), evaluation_prompts=0, validation_share=0.0), verifier, tmp_path)
    assert report.dropped == {"refused_by_template": 1} and report.rows == 2
    asked = [normalise({"id": str(i), "messages": [{"role": "user", "content": f"{i}?"}]}) for i in range(3)]
    assert len(list(opening_prompts(asked, ChatTemplate.load(verifier)))) == 2


def test_where_all_are_refused_the_template_has_the_word(make_verifier: Callable[..., Path], tmp_path: Path) -> None:
    verifier, source = make_verifier("{{ 1/0 }}"), write(tmp_path / "chats.jsonl", 3)
    told = r"of 3 conversations: refused_by_template 3 \(first at .* the chat template refuses .*ZeroDivisionError"
    with pytest.raises(DataError, match=told) as caught:
        prepare(DataConfig(sources=(source,), evaluation_prompts=0, validation_share=0.0), verifier, tmp_path / "out")
    assert caught.value.mend and "chat template" in caught.value.mend and "max_length" not in caught.value.mend
    with pytest.raises(DataError, match=r"none of 1 conversations .*refused_by_template 1 .*ZeroDivision") as caught:
        regenerate(
            [normalise({"id": "x", "messages": CHAT})],
            None,  # type: ignore[arg-type]  # nothing is left to ask an engine
            ChatTemplate.load(verifier),
            read_facts(verifier),
            RegenerationConfig(),
            tmp_path / "replies.jsonl",
        )
    assert caught.value.mend and "chat template" in caught.value.mend


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{{ messages }}\n{% if %}", "line 2: "),
        ("{{ messages | nothing }}", "line 1: "),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", ": "),
        ("{% for i in x %}" * 200 + "{% endfor %}" * 200, ": "),
    ],
)
def test_a_broken_one_is_found_at_once_and_named(
    make_verifier: Callable[..., Path], verifier: Path, template: str, told: str
) -> None:
    with pytest.raises(VerifierError, match=rf"chat_template\.jinja is broken.*{told}") as caught:
        ChatTemplate.load(make_verifier(template))
    assert caught.value.mend and "correct it" in caught.value.mend


def test_a_named_one_that_is_broken_is_found_too(make_verifier: Callable[..., Path]) -> None:
    verifier = make_verifier()
    (verifier / "additional_chat_templates").mkdir()
    (verifier / "additional_chat_templates" / "tool_use.jinja").write_text("{% endfor %}")
    with pytest.raises(VerifierError, match=r"tool_use\.jinja is broken, line 1: "):
        ChatTemplate.load(verifier)


def test_a_tokenizer_that_fails_at_a_text_is_to_blame_for_it(make_verifier: Callable[..., Path]) -> None:
    verifier = make_verifier()
    stored = json.loads((verifier / "tokenizer.json").read_text())
    wordy = {"type": "WordLevel", "vocab": {"hello": 0}, "unk_token": "[UNK]"}
    (verifier / "tokenizer.json").write_text(json.dumps(stored | {"model": wordy}))
    with pytest.raises(VerifierError, match=r"tokenizer fails at a conversation: .*UNK"):
        ChatTemplate.load(verifier).ids(CHAT)
