"""What of served traffic is kept: only what its user agreed to, by rate or by acceptance, redacted."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hs_connectors.errors import SettingsError
from hs_connectors.vllm.sampler import VARIABLE, Sampler, SampleSettings, read_answer
from speculators_core.data.conversations import normalise, read_conversations
from speculators_core.engine.client import NOBODYS

MESSAGES = [{"role": "user", "content": "my name is Ada"}]
YES = [(b"X-Draftsmith-Consent", b"yes")]


def choice(index: int = 0, finish_reason: str | None = None, **content: Any) -> dict[str, Any]:
    return {"index": index, "finish_reason": finish_reason, **content}


def whole(reply: str, histogram: list[int] | None = None) -> list[bytes]:
    metrics = {"speculative_decoding": {"acceptance_histogram": histogram}} if histogram else None
    choices = [choice(finish_reason="stop", message={"content": reply})]
    return [json.dumps({"choices": choices, "metrics": metrics}).encode()]


def events(*chunks: Any) -> list[bytes]:
    return [*(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks), b"data: [DONE]\n\n"]


def streamed(*parts: str, histogram: list[int] | None = None) -> list[bytes]:
    deltas = [{"role": "assistant"}, *({"content": part} for part in parts)]
    choices = [*(choice(delta=delta) for delta in deltas), choice(finish_reason="stop", delta={})]
    usage = {"choices": [], "metrics": {"speculative_decoding": {"acceptance_histogram": histogram}}}
    return events(*({"choices": [one]} for one in choices), *([usage] if histogram else []))


def serve(answer: list[bytes], status: int = 200) -> Callable[..., Any]:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": status, "headers": []})
        for number, body in enumerate(answer):
            await send({"type": "http.response.body", "body": body, "more_body": number + 1 < len(answer)})

    return app


@pytest.fixture
def sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    def run(
        answer: list[bytes],
        headers: Any = YES,
        status: int = 200,
        path: str = "/v1/chat/completions",
        request: dict[str, Any] | None = None,
        **settings: Any,
    ) -> list[Any]:
        """One request through a sampler; what was kept, after proving that the client got all of the answer."""
        monkeypatch.setenv(VARIABLE, json.dumps({"directory": str(tmp_path / "kept"), "rate": 1.0, **settings}))
        sampler = Sampler(serve(answer, status))
        body = json.dumps({"messages": MESSAGES, **(request or {})}).encode()
        parts = iter([{"body": body[:9], "more_body": True}, {"body": body[9:]}])
        got: list[bytes] = []

        async def receive() -> Any:
            return next(parts)

        async def send(message: Any) -> None:
            got.append(message.get("body", b""))

        asyncio.run(sampler({"type": "http", "method": "POST", "path": path, "headers": headers}, receive, send))
        sampler._keeper.close()
        assert b"".join(got) == b"".join(answer)
        files = (tmp_path / "kept").glob("*.jsonl")
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]

    return run


@pytest.mark.parametrize("answer", [whole("Hello Ada"), streamed("Hel", "lo Ada")])
def test_a_permitted_conversation_is_kept_as_a_source_reads_it(
    sample: Any, answer: list[bytes], tmp_path: Path
) -> None:

    (line,) = sample(answer)
    assert line["conversations"] == [*MESSAGES, {"role": "assistant", "content": "Hello Ada"}]
    (conversation,) = read_conversations([str(tmp_path / "kept")])
    assert conversation.domain == "served" and conversation.messages[-1]["content"] == "Hello Ada"


@pytest.mark.parametrize(
    "request_of",
    [{"headers": []}, {"headers": [(b"x-draftsmith-consent", b"no")]}, {"status": 400}, {"path": "/v1/completions"}],
)
def test_what_was_not_agreed_to_or_failed_or_is_no_chat_is_not_kept(sample: Any, request_of: dict[str, Any]) -> None:
    assert sample(whole("Hello"), **request_of) == []


def test_an_operator_may_say_that_all_agreed_but_for_those_who_say_no(sample: Any) -> None:
    refusals = [(name.encode(), value.encode()) for name, value in NOBODYS.items()]
    assert sample(whole("Hello"), headers=refusals, consent="all") == [], "a request of draftsmith's own"
    assert sample(whole("Hello"), headers=[*YES, *refusals], consent="all") == []
    assert len(sample(whole("Hello"), headers=[], consent="all")) == 1


def test_what_is_kept_is_its_owners_alone(sample: Any, tmp_path: Path) -> None:
    assert len(sample(whole("Hello"))) == 1
    (file,) = (tmp_path / "kept").iterdir()
    assert [path.stat().st_mode & 0o777 for path in (file.parent, file)] == [0o700, 0o600]


def test_the_worst_accepted_are_kept_whatever_the_rate(sample: Any) -> None:
    assert len(sample(whole("x", [8, 2, 0]), rate=0.0, acceptance_below=1.5)) == 1
    assert len(sample(whole("x", [0, 2, 8]), rate=0.0, acceptance_below=1.5)) == 1, "the second was accepted well"
    assert len(sample(streamed("x"), rate=0.0, acceptance_below=1.5)) == 1, "a stream without usage does not tell"
    assert len(sample(streamed("x", histogram=[0, 2, 8]), rate=0.0, acceptance_below=1.5)) == 1
    assert len(sample(streamed("x", histogram=[8, 2, 0]), rate=0.0, acceptance_below=1.5)) == 2


def test_redaction_comes_before_the_disk(sample: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = ModuleType("hooks")
    hooks.mask = lambda turns: [{**turn, "content": turn["content"].replace("Ada", "###")} for turn in turns]  # type: ignore[attr-defined]
    hooks.refuse = lambda turns: None  # type: ignore[attr-defined]
    hooks.breaks = lambda turns: 1 / 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hooks", hooks)
    assert sample(whole("Hello"), redact="hooks:refuse") == [] == sample(whole("Hello"), redact="hooks:breaks")
    (line,) = sample(whole("Hello Ada"), redact="hooks:mask")
    assert "Ada" not in json.dumps(line)
    with pytest.raises(SettingsError, match="cannot be imported"):
        sample(whole("x"), redact="nowhere:at_all")


def test_tools_are_kept_only_where_nothing_is_redacted(sample: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = [{"type": "function", "function": {"name": "call_ada"}}]
    (line,) = sample(whole("Hello"), request={"tools": tools})
    assert line["tools"] == tools
    hooks = ModuleType("hooks")
    hooks.mask = lambda turns: turns  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hooks", hooks)
    lines = sample(whole("Hello"), request={"tools": tools}, redact="hooks:mask")
    assert sorted("tools" in line for line in lines) == [False, True], "that of before, and the redacted one"


def test_a_reply_that_goes_on_with_the_users_half_is_not_kept(sample: Any) -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": "Hel"}]
    assert sample(whole("lo"), request={"messages": begun, "continue_final_message": True}) == []


def test_a_full_quota_ends_it(sample: Any) -> None:
    assert sample(whole("Hello"), max_bytes=10) == []


def test_it_is_off_by_default_and_settings_without_sense_are_refused() -> None:
    assert SampleSettings.from_environment({}) is None
    for text, told in (
        ('{"directory": "d"}', "nothing would be kept"),
        ('{"directory": "d", "rate": 2}', "rate is 2"),
        ('{"directory": "d", "rate": 1, "consent": "maybe"}', "header or all"),
        ('{"directory": "d", "rat": 1}', "unknown rat"),
        ("[]", "no JSON object"),
    ):
        with pytest.raises(SettingsError, match=told):
            SampleSettings.from_environment({VARIABLE: text})


def read(*choices: Any, part: str = "message") -> dict[str, Any] | None:
    """The message of an answer of one such choice, or of a stream of them."""
    if part == "message":
        return read_answer(json.dumps({"choices": choices}).encode())[0]
    return read_answer(b"".join(events(*({"choices": [one]} for one in choices))))[0]


def test_of_several_choices_the_first_is_read_alone() -> None:
    first, second = ({"content": text} for text in ("Hello", "Good day"))
    assert read(choice(1, "stop", message=second), choice(0, "stop", message=first)) == {"role": "assistant", **first}
    ends = [choice(index, "stop", delta={}) for index in (1, 0)]
    halves = [choice(0, delta={"content": "Hel"}), choice(1, delta=second), choice(0, delta={"content": "lo"})]
    assert read(*halves, *ends, part="delta") == {"role": "assistant", **first}
    assert read(*halves, ends[0], part="delta") is None, "only the second one ended"


@pytest.mark.parametrize("reason", [None, "abort", "error", "content_filter", "tool_calls"])
def test_what_is_no_whole_reply_in_words_is_nothing(reason: str | None) -> None:
    assert read(choice(0, reason, message={"content": "Hel"})) is None
    assert read(choice(0, delta={"content": "Hel"}), choice(0, reason, delta={}), part="delta") is None
    assert read(choice(0, "stop", message={"content": None})) is None
    assert read(choice(0, "stop", message={"content": "I call", "tool_calls": [{"id": "1"}]})) is None


def test_a_stream_that_broke_off_is_nothing() -> None:
    sent = streamed("Hel", "lo")
    assert read_answer(b"".join(sent))[0] == {"role": "assistant", "content": "Hello"}
    for end in range(1, len(sent)):
        assert read_answer(b"".join(sent[:end]))[0] is None
    refused = {"error": {"message": "the engine died"}}
    assert read_answer(b"".join(events({"choices": [choice(delta={"content": "Hel"})]}, refused)))[0] is None


def test_a_reply_that_was_cut_off_says_so_and_reasoning_stays_with_it() -> None:
    message = {"content": "Hello", "reasoning": "A name."}
    kept = {"role": "assistant", "content": "Hello", "reasoning_content": "A name."}
    assert read(choice(0, "stop", message=message)) == kept
    assert read(choice(0, "stop", stop_reason=151645, message=message)) == kept
    for cut in (choice(0, "length", message=message), choice(0, "stop", stop_reason="\n", message=message)):
        assert read(cut) == {**kept, "finish_reason": "length"}
    normal = normalise({"conversations": [*MESSAGES, {**kept, "finish_reason": "length"}]})
    assert normal.messages[-1] == {**kept, "finish_reason": "length"}
