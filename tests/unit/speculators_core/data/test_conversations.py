"""Records of several forms become one form; what cannot be used is counted by its cause."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from speculators_core.data.conversations import engine_messages, normalise, read_conversations, template_messages
from speculators_core.data.report import MENDS, Dropped
from speculators_core.errors import DataError

from .conftest import CONVERSATIONS


def test_every_cause_is_counted_and_the_rest_is_kept() -> None:
    dropped = Dropped()
    kept = list(read_conversations([str(CONVERSATIONS / "broken.jsonl")], dropped))
    assert [conversation.id for conversation in kept] == ["fine", "question", "fine-again"]
    assert dropped == {
        "invalid_json": 1,
        "not_an_object": 1,
        "no_messages": 1,
        "unknown_role": 1,
        "multimodal": 1,
        "malformed_message": 1,
        "invalid_tools": 1,
    }


@pytest.mark.parametrize(
    ("record", "cause", "words"),
    [
        ({"prompt": "a", "completion": "b"}, "no_messages", "has the keys prompt, completion; expected messages or"),
        ({"messages": []}, "no_messages", "messages holds no list of turns"),
        (
            {"messages": [{"user": "a", "assistant": "b"}]},
            "unknown_role",
            "a turn with the keys user, assistant; expect",
        ),
        ({"messages": [{"role": "narrator", "content": "a"}]}, "unknown_role", "of the role narrator; expected one of"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "multimodal", "a part of the type image"),
        ({"messages": ["hello"]}, "malformed_message", "a turn that is no object"),
        ({"\ud800\n" * 40: 1}, "no_messages", r"has the keys \ud800\n"),
    ],
)
def test_what_is_wrong_with_a_record_is_said_in_words(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, record: object, cause: str, words: str
) -> None:
    source = tmp_path / "bad.jsonl"
    source.write_bytes(_LINE + b"\n" + json.dumps(record).encode() + b"\n" + json.dumps(record).encode())
    dropped = Dropped()
    assert len(list(read_conversations([str(source)], dropped))) == 1
    assert dropped.first[cause].where == "bad.jsonl:2" and words in dropped.first[cause].what
    assert len(dropped.first[cause].what) < 200
    assert dropped.mend() == MENDS[cause]
    with caplog.at_level(logging.WARNING):
        list(read_conversations([str(source)]))
    assert f"left out: {cause} 2 (first at bad.jsonl:2 {dropped.first[cause].what})" in caplog.text


def test_from_value_system_and_missing_ids() -> None:
    first, second = read_conversations([str(CONVERSATIONS / "sharegpt.jsonl")])
    assert [message["role"] for message in first.messages] == ["system", "user", "assistant"]
    assert first.id == "river" and first.domain == "all"
    assert len(second.id) == 16 and second.assistant_turns() == (1, 3)


def test_tool_calls_reach_template_and_engine_in_their_own_forms() -> None:
    (conversation,) = read_conversations([str(CONVERSATIONS / "tools.jsonl")])
    call = template_messages(conversation.messages)[1]["tool_calls"][0]
    assert call["function"]["arguments"] == {"city": "Bergen"} and call["id"] == "call_1"
    sent = engine_messages(conversation.messages)
    assert json.loads(sent[1]["tool_calls"][0]["function"]["arguments"]) == {"city": "Bergen"}
    assert sent[2]["tool_call_id"] == "call_1" and conversation.tools


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_kept_under_the_names_that_engine_and_templates_use(name: str) -> None:
    messages = [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4", name: "two and two"}]
    conversation = normalise({"messages": messages})
    shown = template_messages(conversation.messages)[1]
    assert shown["reasoning"] == shown["reasoning_content"] == "two and two"
    assert engine_messages(conversation.messages)[1] == {
        "role": "assistant",
        "content": "4",
        "reasoning": "two and two",
    }


def test_directories_are_read_recursively_in_a_fixed_order(tmp_path: Path) -> None:
    record = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    for name in ("b/x.jsonl", "a.jsonl", "b/a/z.json"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(record | {"id": name}))
    (tmp_path / "notes.txt").write_text("not data")
    ids = [conversation.id for conversation in read_conversations([str(tmp_path)])]
    assert ids == ["a.jsonl", "b/a/z.json", "b/x.jsonl"]


def test_a_source_that_cannot_be_is_an_error_that_teaches(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("a,b")
    (tmp_path / "empty").mkdir()
    for source, words in {"nowhere.jsonl": "does not exist", "table.csv": "neither", "empty": "holds no"}.items():
        with pytest.raises(DataError, match=words) as caught:
            list(read_conversations([str(tmp_path / source)]))
        assert caught.value.mend


_LINE = b'{"conversations": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}'


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (_LINE.replace(b"hi", b"h\xff"), "invalid_text"),
        (_LINE.replace(b"hi", b"h\\ud800"), "invalid_text"),
        (_LINE.replace(b"hi", b"h\x00"), "invalid_json"),
        (b"[" * 200_000, "invalid_json"),
        (b'{"id": ' + b"9" * 6000 + b"}", "invalid_json"),
        (_LINE[:-1] + b', "turns": 5}', "malformed_message"),
        (
            _LINE[:-1] + b', "turns": [{"message": Infinity, "prompt_token_ids": [], "token_ids": []}]}',
            "malformed_message",
        ),
        (_LINE[:-1] + b', "tools": "' + b"[" * 200_000 + b'"}', "invalid_tools"),
        (_LINE.replace(b'"yo"', b'"yo", "tool_calls": 5'), "malformed_message"),
    ],
    ids=lambda value: value[:12] if isinstance(value, bytes) else value,
)
def test_a_hostile_line_costs_itself_and_nothing_else(tmp_path: Path, line: bytes, cause: str) -> None:
    source, dropped = tmp_path / "source.jsonl", Dropped()
    source.write_bytes(b"\n".join([_LINE, line, _LINE]))
    assert len(list(read_conversations([str(source)], dropped))) == 2
    assert dropped == {cause: 1}


@pytest.mark.parametrize("name", ["source.json", "source.jsonl"])
def test_a_byte_order_mark_costs_no_record(tmp_path: Path, name: str) -> None:
    source, dropped = tmp_path / name, Dropped()
    source.write_bytes(b"\xef\xbb\xbf" + _LINE)
    assert len(list(read_conversations([str(source)], dropped))) == 1 and not dropped


def test_a_json_file_beyond_reading_is_one_error(tmp_path: Path) -> None:
    source = tmp_path / "source.json"
    source.write_bytes(b"[" * 200_000)
    with pytest.raises(DataError, match="not valid JSON"):
        list(read_conversations([str(source)]))
