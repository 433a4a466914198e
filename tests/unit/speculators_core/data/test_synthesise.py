"""Where the verifier begins to write a user's turn, where it stops, and which samples are thrown away."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from speculators_core.data.config import SynthesisConfig
from speculators_core.data.synthesise import judge, synthesise, user_turn
from speculators_core.data.template import ChatTemplate
from speculators_core.engine.client import Generation, GenerationRequest
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


class Writer:
    """Answers each request by its seed alone, and tells how many it answered."""

    def __init__(self) -> None:
        self.answered = 0

    def generate(self, requests: Iterable[GenerationRequest], *, concurrency: int) -> Iterator[Generation]:
        for request in requests:
            self.answered += 1
            text = f"what do {request.seed} bees and {request.seed} bears say of {request.seed}?"
            ending = "length" if (request.seed or 0) % 5 == 0 else "stop"
            yield Generation(id=request.id, prompt_token_ids=(1,), token_ids=(3, 2), text=text, finish_reason=ending)


def test_samples_of_an_interrupted_run_are_not_drawn_again(verifier: Path, tmp_path: Path) -> None:
    template, config = ChatTemplate.load(verifier), SynthesisConfig(prompts=12)

    def run(name: str, stop_at: int | None = None, **changes: int) -> tuple[bytes, int, int]:
        def stop(done: int, _: int) -> None:
            if done == stop_at:
                raise KeyboardInterrupt

        writer, output = Writer(), tmp_path / name
        settings = config.model_copy(update=changes)
        report = synthesise(writer, template, settings, output, producer="v1", progress=stop)  # type: ignore[arg-type]
        return output.read_bytes(), writer.answered, report.resumed

    whole, samples, _ = run("whole.jsonl")
    with pytest.raises(KeyboardInterrupt):
        run("cut.jsonl", stop_at=7)
    assert not (tmp_path / "cut.jsonl").exists()
    again, drawn, resumed = run("cut.jsonl")
    assert again == whole and resumed >= 7 and drawn == samples - resumed
    with pytest.raises(KeyboardInterrupt):
        run("other.jsonl", stop_at=7)
    assert run("other.jsonl", seed=1)[2] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut.jsonl", "other.jsonl", "whole.jsonl"]
