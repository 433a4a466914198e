"""The mask covers what the verifier wrote: end of turn included, template text excluded, in every turn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from speculators_core.data.conversations import Conversation, normalise, read_conversations
from speculators_core.data.masking import Turn, clip, common_prefix, merge, renderings, turn_of
from speculators_core.data.template import ChatTemplate

from .conftest import CHATML, CONVERSATIONS, FORGETFUL, OPENING

END = frozenset({2})


def load(name: str) -> list[Conversation]:
    return list(read_conversations([str(CONVERSATIONS / name)]))


def turns_of(conversation: Conversation, template: ChatTemplate) -> list[Turn | None]:
    return [
        turn_of(item, *template.tokenise([item.prompt, item.full]), template, END)
        for item in renderings(conversation, template)
    ]


def supervised(row_ids: list[int], mask: list[int], template: ChatTemplate) -> list[str]:
    """Texts of the runs of supervised tokens."""
    texts, run = [], []
    for token, flag in zip([*row_ids, 0], [*mask, 0], strict=True):
        if flag:
            run.append(token)
        elif run:
            texts.append(template.decode(run))
            run = []
    return texts


def test_a_prefix_stable_template_gives_one_row_with_every_reply(verifier: Path) -> None:
    template = ChatTemplate.load(verifier)
    conversation = load("multi_turn.jsonl")[0]
    (row,) = merge(turn for turn in turns_of(conversation, template) if turn)
    replies = [message["content"] for message in conversation.messages if message["role"] == "assistant"]
    assert supervised(row.input_ids, row.loss_mask, template) == [f"{reply}<|im_end|>" for reply in replies]
    whole = template.ids(conversation.messages)
    assert whole[: len(row.input_ids)] == row.input_ids
    assert template.decode(whole[len(row.input_ids) :]) == "\n", "only what follows the last end of turn is left out"


def test_a_template_that_rewrites_history_gives_one_row_a_turn(make_verifier: Callable[..., Path]) -> None:
    template = ChatTemplate.load(make_verifier(FORGETFUL))
    (conversation,) = load("reasoning.jsonl")
    rows = merge(turn for turn in turns_of(conversation, template) if turn)
    texts = [supervised(row.input_ids, row.loss_mask, template) for row in rows]
    assert texts == [
        ["<think>120 divided by 1.5 is 80.</think>It runs at 80 kilometres an hour.<|im_end|>"],
        ["<think>80 times 2.25 is 180.</think>It gets 180 kilometres far.<|im_end|>"],
    ]
    assert "120 divided" not in template.decode(rows[1].input_ids), "as served: history without its reasoning"
    for row, j in zip(rows, (1, 3), strict=True):
        served = template.ids(conversation.messages[:j], add_generation_prompt=True)
        assert row.input_ids[: len(served)] == served


def test_the_same_conversation_shares_a_row_where_reasoning_stays(verifier: Path) -> None:
    template = ChatTemplate.load(verifier)
    (row,) = merge(turn for turn in turns_of(load("reasoning.jsonl")[0], template) if turn)
    assert len(row.turns) == 2 and len(supervised(row.input_ids, row.loss_mask, template)) == 2


def test_a_reply_is_found_where_prompt_and_full_part(make_verifier: Callable[..., Path]) -> None:
    template = ChatTemplate.load(make_verifier(OPENING))
    conversation = normalise({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]})
    (turn,) = turns_of(conversation, template)
    assert turn is not None and not turn.aligned
    assert template.decode(turn.reply) == "Ho<|im_end|>"


def test_no_boundary_is_guessed(verifier: Path) -> None:
    template = ChatTemplate.load(verifier)
    conversation = normalise({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]})
    (item,) = renderings(conversation, template)
    prompt, full = template.tokenise([item.prompt, item.full])
    assert turn_of(item, [7, *prompt], full, template, END) is None


def test_tool_calls_are_supervised_and_tool_results_are_not(verifier: Path) -> None:
    template = ChatTemplate.load(verifier)
    (conversation,) = load("tools.jsonl")
    (row,) = merge(turn for turn in turns_of(conversation, template) if turn)
    assert supervised(row.input_ids, row.loss_mask, template) == [
        "<call>get_weather Bergen</call><|im_end|>",
        "Yes, it rains in Bergen at nine degrees.<|im_end|>",
    ]
    assert "Current weather of a city." in template.decode(row.input_ids), "the tools are shown to the verifier"


def test_the_default_system_message_is_context(verifier: Path) -> None:
    template = ChatTemplate.load(verifier, {"persona": "You rhyme."})
    (turn,) = turns_of(load("sharegpt.jsonl")[0], template)
    assert turn and template.decode(turn.prompt).startswith("<|im_start|>system\nYou are a patient teacher.")
    conversation = normalise({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]})
    (turn,) = turns_of(conversation, template)
    assert turn and template.decode(turn.prompt).startswith("<|im_start|>system\nYou rhyme.<|im_end|>")


def test_developers_speak_as_the_system_where_the_template_knows_none(make_verifier: Callable[..., Path]) -> None:
    record = [("system", "Be brief."), ("user", "Hi"), ("developer", "Be kind."), ("assistant", "Ho")]
    messages = normalise({"messages": [{"role": role, "content": content} for role, content in record]}).messages
    text = ChatTemplate.load(make_verifier()).text(messages)
    assert text.startswith("<|im_start|>system\nBe brief.\n\nBe kind.<|im_end|>\n<|im_start|>user")
    knows = CHATML + "{# 'developer' #}"
    assert "<|im_start|>developer\nBe kind." in ChatTemplate.load(make_verifier(knows)).text(messages)


def test_an_opening_by_the_assistant_is_context(verifier: Path) -> None:
    template = ChatTemplate.load(verifier)
    record = [("assistant", "Welcome."), ("user", "Hi"), ("assistant", "Ho")]
    conversation = normalise({"messages": [{"role": role, "content": content} for role, content in record]})
    (turn,) = turns_of(conversation, template)
    assert turn and turn.message == 2 and "Welcome." in template.decode(turn.prompt)


@pytest.mark.parametrize(
    ("length", "mask", "messages"),
    [(9, [0, 0, 1, 1, 0, 0, 1, 1], [1, 3]), (7, [0, 0, 1, 1, 0, 0, 1], [1, 3]), (6, [0, 0, 1, 1], [1]), (2, [], [])],
)
def test_clipping_ends_at_a_supervised_token(length: int, mask: list[int], messages: list[int]) -> None:
    (row,) = merge([Turn(1, [5, 6], [7, 8]), Turn(3, [5, 6, 7, 8, 9, 10], [11, 12])])
    kept = clip(row, length)
    assert kept.loss_mask == mask and kept.input_ids == row.input_ids[: len(mask)]
    assert [turn.message for turn in kept.turns] == messages


def test_merge_joins_exactly_what_continues() -> None:
    rows = merge(
        [Turn(1, [1], [2]), Turn(3, [1, 2, 3], [4]), Turn(5, [1, 9, 3, 4, 5], [6]), Turn(7, [1, 9, 3, 4, 5, 6], [7])]
    )
    assert [row.input_ids for row in rows] == [[1, 2, 3, 4], [1, 9, 3, 4, 5, 6, 7]]
    assert [row.loss_mask for row in rows] == [[0, 1, 0, 1], [0, 0, 0, 0, 0, 1, 1]]


def test_common_prefix() -> None:
    assert [common_prefix([1, 2, 3], other) for other in ([], [1], [1, 2, 3, 4], [1, 9, 3], [9])] == [0, 1, 3, 1, 0]
