"""Where the verifier begins to write a user's turn, where it stops, and which samples are thrown away."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from speculators_core.data.config import SynthesisConfig
from speculators_core.data.synthesise import judge, user_turn
from speculators_core.data.template import ChatTemplate
from speculators_core.engine.client import Generation
from speculators_core.errors import DataError


def test_the_prefix_ends_where_the_users_text_begins(verifier: Path) -> None:
    template = ChatTemplate.load(verifier)
    prefix, stops = user_turn(template)
    assert template.decode(prefix) == "<|im_start|>system\nYou are helpful.<|im_end|>\n<|im_start|>user\n"
    assert stops == (2,)


def test_a_template_without_an_end_of_turn_is_refused(make_verifier: Callable[..., Path]) -> None:
    plain = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    with pytest.raises(DataError, match="no special token to end it") as caught:
        user_turn(ChatTemplate.load(make_verifier(plain)))
    assert caught.value.mend


@pytest.mark.parametrize(
    ("text", "finish", "cause"),
    [
        (" How do bees find their way home? ", "stop", None),
        ("How do bees find", "length", "unfinished"),
        ("Hi there", "stop", "too_short"),
        ("What does \ufffd mean here?", "stop", "broken_text"),
    ],
)
def test_samples_are_judged(text: str, finish: str, cause: str | None) -> None:
    generation = Generation(id="1", prompt_token_ids=(), token_ids=(), text=text, finish_reason=finish)
    assert judge(generation, SynthesisConfig()) == (cause, text.strip())
