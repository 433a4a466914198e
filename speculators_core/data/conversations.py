"""Conversations from files, directories and Hugging Face data sets, in one form.

Accepted records: `conversations` or `messages` holding `role`/`content` or `from`/`value` turns; optionally `id`,
`domain`, `system`, `tools`. Tool calls, tool results and reasoning content are kept. A record that cannot be used is
counted under a cause and never guessed at.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from speculators_core.data.report import Dropped
from speculators_core.errors import DataError

log = logging.getLogger(__name__)

Message = Mapping[str, Any]

ROLES = {
    "system": "system", "developer": "developer",
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "model": "assistant", "bot": "assistant", "chatgpt": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool", "ipython": "tool",
}  # fmt: skip
_TURN_KEYS = ("messages", "conversations", "conversation")
_ID_KEYS = ("id", "uuid", "conversation_id", "prompt_id")
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_OURS = ("finish_reason",)  # known to us, shown to nobody
_HUB = re.compile(r"^hf:(?P<id>[\w.-]+(?:/[\w.-]+)?)(?:@(?P<revision>[^:]+))?(?::(?P<rest>.+))?$")


@dataclass(frozen=True)
class ExactTurn:
    """Ids of one reply as an engine produced it, and of the prompt that it answered.

    `message` is the index of the reply in the conversation's messages.
    """

    message: int
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    finish_reason: str | None = None


@dataclass(frozen=True)
class Conversation:
    """Messages in OpenAI's form (role, content, tool_calls, tool_call_id, name, reasoning_content), and where from."""

    id: str
    domain: str
    messages: tuple[Message, ...]
    tools: Sequence[Any] | None = None
    exact: tuple[ExactTurn, ...] = ()
    origin: str = field(default="", compare=False)

    @property
    def first_user_turn(self) -> str:
        """Text by which the conversation is assigned to a split; the first message's where no user speaks."""
        for message in self.messages:
            if message["role"] == "user":
                return str(message["content"])
        return str(self.messages[0]["content"]) if self.messages else ""

    def assistant_turns(self) -> tuple[int, ...]:
        """Indices of the messages that a verifier could have written: assistant's, with something before them."""
        return tuple(i for i, message in enumerate(self.messages) if message["role"] == "assistant" and i > 0)


class _Unusable(Exception):
    """A record that is counted under `cause` and left out; `what` is wrong with it, in words."""

    def __init__(self, cause: str, what: str) -> None:
        super().__init__(what)
        self.cause, self.what = cause, what


def read_conversations(sources: Sequence[str], dropped: Dropped | None = None) -> Iterator[Conversation]:
    """Yield usable conversations in the order of the sources; what is unusable is counted by cause in `dropped`.

    Without `dropped`, the log says at the end what was left out.

    Causes: invalid_json, invalid_text (bytes that are no UTF-8, lone surrogates), not_an_object, no_messages,
    malformed_message, unknown_role, multimodal, invalid_tools.

    Raises:
        DataError: a source does not exist, is of an unknown kind, or holds no file.
    """
    unusable = Dropped() if dropped is None else dropped
    for source in sources:
        for origin, record in _records(source):
            try:
                yield normalise(record, origin=origin)
            except _Unusable as error:
                unusable.add(error.cause, origin, error.what)
    if dropped is None and unusable:
        log.warning("left out: %s", unusable.in_words())


def check_sources(sources: Sequence[str]) -> None:
    """Raise a DataError for a source that cannot exist, before anything is read."""
    for source in sources:
        if not _HUB.match(source):
            source_files(source)


def hub_identity(source: str) -> str:
    """A hub source with its revision resolved to a commit, so that new data is told from old; as is when offline."""
    hub = _HUB.match(source)
    if hub is None:
        raise DataError(f"the source {source!r} names no data set", mend="write hf:ID[@REVISION][:SUBSET][:SPLIT]")
    import httpx
    from huggingface_hub import HfApi

    try:
        commit = HfApi().dataset_info(hub["id"], revision=hub["revision"]).sha
    except (OSError, httpx.HTTPError) as error:
        log.warning("%s: its revision cannot be looked up (%s); it counts as unchanged", source, error)
        return source
    return f"hf:{hub['id']}@{commit}:{hub['rest'] or 'train'}"


def normalise(record: object, *, origin: str = "") -> Conversation:
    """One record as a Conversation; raises _Unusable with a cause (see `read_conversations`)."""
    if isinstance(record, str):  # a line of a file, not parsed yet
        record = _parsed(record, "invalid_json")
    if not isinstance(record, Mapping):
        raise _Unusable("not_an_object", "is no JSON object")
    turns = next((record[key] for key in _TURN_KEYS if record.get(key)), None)
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        named = next((key for key in _TURN_KEYS if key in record), None)
        expected = "expected messages or conversations" if named is None else f"{named} holds no list of turns"
        raise _Unusable("no_messages", f"has the keys {_shown(*record)}; {expected}")
    messages = [_message(turn) for turn in turns]
    system = record.get("system")
    if isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    shift = len(messages) - len(turns)
    identity = next((str(record[key]) for key in _ID_KEYS if record.get(key) not in (None, "")), None)
    domain, tools = str(record.get("domain") or "all"), _tools(record.get("tools"))
    try:
        canonical([identity, domain, messages, tools]).encode()
    except (UnicodeEncodeError, RecursionError):  # what cannot be written down again cannot be trained on
        raise _Unusable("invalid_text", "holds bytes that are no UTF-8, or lone surrogates") from None
    return Conversation(
        id=identity or content_id(messages),
        domain=domain,
        messages=tuple(messages),
        tools=tools,
        exact=tuple(_exact(turn, shift) for turn in _listed(record.get("turns"))),
        origin=origin,
    )


def content_id(messages: Iterable[Message]) -> str:
    """16 hex digits of the sha256 of the messages: the identity of a record that names none."""
    return hashlib.sha256(canonical(list(messages)).encode()).hexdigest()[:16]


def canonical(value: object) -> str:
    """JSON with sorted keys and no blanks: equal content, equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=str)


def engine_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as OpenAI's chat API takes them: arguments of tool calls as JSON text, reasoning as `reasoning`."""
    result = []
    for message in messages:
        sent = {key: value for key, value in message.items() if key not in (*_OURS, "reasoning_content", "tool_calls")}
        if message.get("reasoning_content") is not None:
            sent["reasoning"] = message["reasoning_content"]
        if message.get("tool_calls"):
            sent["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
                for call in message["tool_calls"]
            ]
        result.append(sent)
    return result


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates take them: arguments as mappings, reasoning under both names in use (as vLLM does)."""
    result = []
    for message in messages:
        shown = {key: value for key, value in message.items() if key not in _OURS}
        if message.get("reasoning_content") is not None:
            shown["reasoning"] = message["reasoning_content"]
        result.append(shown)
    return result


def trimmed(conversation: Conversation) -> Conversation:
    """Without what follows the last assistant turn: nothing there can be learned."""
    turns = conversation.assistant_turns()
    return replace(conversation, messages=conversation.messages[: turns[-1] + 1] if turns else ())


def _message(turn: object) -> Message:
    if not isinstance(turn, Mapping):
        raise _Unusable("malformed_message", "has a turn that is no object")
    name = turn.get("role", turn.get("from"))
    role = ROLES.get(str(name).lower())
    if role is None and name is None:
        raise _Unusable("unknown_role", f"has a turn with the keys {_shown(*turn)}; expected role and content")
    if role is None:
        raise _Unusable("unknown_role", f"has a turn of the role {_shown(name)}; expected one of {_shown(*ROLES)}")
    message: dict[str, Any] = {"role": role, "content": _text(turn.get("content", turn.get("value")))}
    for key in ("name", "tool_call_id", "finish_reason"):
        if isinstance(turn.get(key), str):
            message[key] = turn[key]
    reasoning = next((turn[key] for key in _REASONING_KEYS if isinstance(turn.get(key), str)), None)
    if role == "assistant" and reasoning is not None:
        message["reasoning_content"] = reasoning
    if role == "assistant" and turn.get("tool_calls"):
        message["tool_calls"] = [_tool_call(call) for call in _listed(turn["tool_calls"])]
    return message


def _parsed(text: str, cause: str) -> object:
    """JSON of a record; numbers of thousands of digits and endless nesting are as unusable as torn text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _Unusable(cause, f"holds what is no JSON: {error}") from None


def _shown(*names: object) -> str:
    """Names from somebody's data for one line of a message: printable, and not endlessly long."""
    short = [repr(str(name)[:32])[1:-1] for name in names[:20]]
    return ", ".join([*short, "…"] if len(names) > 20 else short) or "(none)"


def _listed(value: object) -> Sequence[object]:
    if not value:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise _Unusable("malformed_message", "has tool calls or turns that are no list")
    return value


def _text(content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise _Unusable("malformed_message", "has a turn whose content is neither text nor a list of parts")
    parts = []
    for part in content:
        if isinstance(part, str):
            parts.append(part)
        elif isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
            parts.append(part["text"])
        elif isinstance(part, Mapping) and "type" in part:
            raise _Unusable("multimodal", f"has a part of the type {_shown(part['type'])}; only text is read")
        else:
            raise _Unusable("malformed_message", "has a part of a content that names no type")
    return "\n".join(parts)  # as vLLM joins them for templates that take plain text


def _tool_call(call: object) -> Message:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _Unusable("malformed_message", "has a tool call without a function's name")
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments.strip():
        arguments = _parsed(arguments, "malformed_message")
    normal: dict[str, Any] = {
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments if isinstance(arguments, Mapping) else {}},
    }
    return {"id": call["id"], **normal} if isinstance(call.get("id"), str) else normal


def _tools(value: object) -> Sequence[Any] | None:
    if isinstance(value, str) and value.strip():
        value = _parsed(value, "invalid_tools")
    if not value:
        return None
    if not isinstance(value, Sequence) or not all(isinstance(tool, Mapping) for tool in value):
        raise _Unusable("invalid_tools", "has tools that are no list of objects")
    return [tool if tool.get("type") == "function" else {"type": "function", "function": tool} for tool in value]


def _exact(turn: object, shift: int) -> ExactTurn:
    try:
        assert isinstance(turn, Mapping)
        return ExactTurn(
            message=int(turn["message"]) + shift,
            prompt_token_ids=tuple(int(token) for token in turn["prompt_token_ids"]),
            token_ids=tuple(int(token) for token in turn["token_ids"]),
            finish_reason=turn.get("finish_reason"),
        )
    except (AssertionError, KeyError, TypeError, ValueError, OverflowError):
        raise _Unusable("malformed_message", "has `turns` without message, prompt_token_ids and token_ids") from None


def _records(source: str) -> Iterator[tuple[str, object]]:
    hub = _HUB.match(source)
    if hub:
        yield from _hub_records(hub)
        return
    for file in source_files(source):
        yield from _file_records(file)


def source_files(source: str) -> list[Path]:
    """The files of a local source, in a fixed order; DataError when there is none."""
    path = Path(source)
    if path.is_file():
        if path.suffix not in (".json", ".jsonl"):
            raise DataError(f"{path} is neither .json nor .jsonl", mend="convert it to JSON Lines, one record a line")
        return [path]
    if path.is_dir():
        files = sorted(file for kind in ("*.jsonl", "*.json") for file in path.rglob(kind) if file.is_file())
        if not files:
            raise DataError(f"the directory {path} holds no .json or .jsonl file", mend="name another directory")
        return files
    raise DataError(
        f"the source {source!r} does not exist",
        mend="name a .jsonl or .json file or a directory of them, or a data set as hf:ID[:SUBSET][:SPLIT]",
    )


def _file_records(file: Path) -> Iterator[tuple[str, object]]:
    if file.suffix == ".jsonl":
        # -sig: a byte order mark belongs to no record; escaped, so that a broken byte costs its own record only
        with file.open(encoding="utf-8-sig", errors="surrogateescape") as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield f"{file.name}:{number}", line
        return
    try:
        content = json.loads(file.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{file} is not valid JSON: {error}", mend="mend it, or name it .jsonl if it holds lines"
        ) from error
    for number, record in enumerate(content if isinstance(content, list) else [content]):
        yield f"{file.name}[{number}]", record


def _hub_records(hub: re.Match[str]) -> Iterator[tuple[str, object]]:
    import datasets

    *subset, split = (hub["rest"] or "train").split(":")
    name = hub["id"]
    if len(subset) > 1:
        raise DataError(f"the source {hub[0]!r} has too many parts", mend="write hf:ID[@REVISION][:SUBSET][:SPLIT]")
    try:
        rows = datasets.load_dataset(name, subset[0] if subset else None, split=split, revision=hub["revision"])
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"the data set {name!r} cannot be loaded: {error}",
            mend="check id, subset and split, and that this machine reaches the hub (HF_ENDPOINT, HF_HUB_OFFLINE)",
        ) from error
    for number, record in enumerate(rows):
        yield f"{name}[{number}]", record
