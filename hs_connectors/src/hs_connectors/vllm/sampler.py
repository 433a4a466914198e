"""One sampler of served traffic: conversations become lines that a recipe's `data.sources` reads. Off unless asked for.

    DRAFTSMITH_SAMPLE='{"directory": "/data/sampled", "rate": 0.01}' \\
        vllm serve … --middleware hs_connectors.vllm.sampler.Sampler

An ASGI middleware: it sees a chat request and its answer, streamed or not, after the client has got it. Only what its
user agreed to is kept: by a header of the request, or because the operator says that all did. Nothing here slows a
reply: choosing, redacting and writing happen in a thread of its own, and what finds it busy is not sampled.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import random
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any, Literal

from hs_connectors.errors import SettingsError

log = logging.getLogger(__name__)

VARIABLE = "DRAFTSMITH_SAMPLE"
CONSENT_HEADER = "x-draftsmith-consent"
"""A request that carries it with the value `yes` may be kept; with any other, never."""
_PATH = "/v1/chat/completions"
_MOST_BYTES = 4 << 20
"""Of a request and of an answer: longer ones are not sampled."""
_WAITING = 32

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]
Redact = Callable[[list[Any]], list[Any] | None]


@dataclass(frozen=True)
class SampleSettings:
    """What is kept.

    directory          where lines go: one file for each server process
    rate               share of the permitted requests that is kept, whatever they are like
    acceptance_below   further, those whose draft was accepted worse than that (1 + accepted / drafts); the server must
                       be started with --per-request-spec-decode-metrics, and a streamed reply tells only where its
                       client asks for `stream_options: {include_usage: true}`
    consent            header: only requests with `x-draftsmith-consent: yes`; all: every user of this server agreed,
                       but for requests whose header says something else
    redact             "module:function" of (messages) -> messages, or None to leave the conversation out; it sees all
                       that is kept of them, `reasoning_content` too, and no `tools` are kept beside what it returns
    max_bytes          of the file; then nothing more is kept
    """

    directory: str
    rate: float = 0.0
    acceptance_below: float | None = None
    consent: Literal["header", "all"] = "header"
    redact: str | None = None
    max_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        """Refuse what samples nothing, or cannot be meant."""
        if not 0 <= self.rate <= 1 or (not self.rate and self.acceptance_below is None):
            raise SettingsError(
                f"{VARIABLE}: rate is {self.rate} and acceptance_below {self.acceptance_below}: nothing would be kept",
                mend="set a rate above 0 and at most 1, an acceptance_below, or leave the variable out",
            )
        if self.consent not in ("header", "all"):
            raise SettingsError(f"{VARIABLE}: consent is header or all, not {self.consent!r}")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> SampleSettings | None:
        """What the variable says; None where it is not set. SettingsError names what is wrong with it."""
        if not (text := environment.get(VARIABLE)):
            return None
        known = {field.name for field in fields(cls)}
        try:
            value = json.loads(text)
            if unknown := sorted(set(value) - known):
                raise SettingsError(
                    f"{VARIABLE}: unknown {', '.join(unknown)}", mend=f"known: {', '.join(sorted(known))}"
                )
            return cls(**value)
        except (ValueError, TypeError) as error:
            raise SettingsError(f"{VARIABLE} is no JSON object of settings: {error}") from error


class Sampler:
    """The middleware; passes everything on untouched."""

    def __init__(self, app: App) -> None:
        """Reads its settings from the environment. SettingsError where they are wrong."""
        self._app = app
        self._settings = SampleSettings.from_environment(os.environ)
        if self._settings is not None:
            self._keeper = Keeper(self._settings)
            log.info("sampling served conversations into %s", self._settings.directory)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve one request; what it was is offered to the keeper afterwards."""
        wanted = scope["type"] == "http" and scope["method"] == "POST" and scope["path"] == _PATH
        if self._settings is None or not wanted or not self._keeper.permits(scope["headers"]):
            await self._app(scope, receive, send)
            return
        asked, answered, status = bytearray(), bytearray(), 0

        async def listen() -> Message:
            message = await receive()
            _collect(asked, message.get("body", b""))
            return message

        async def speak(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)
            _collect(answered, message.get("body", b""))

        await self._app(scope, listen, speak)
        if status == 200:
            self._keeper.offer(bytes(asked), bytes(answered))


class Keeper:
    """Chooses, redacts and writes, in a thread of its own."""

    def __init__(self, settings: SampleSettings, draws: random.Random | None = None) -> None:
        """SettingsError where the hook cannot be imported."""
        self._settings = settings
        self._draws = draws or random.Random()
        self._redact = _load_hook(settings.redact)
        self._path = Path(settings.directory) / f"sampled-{os.getpid()}-{uuid.uuid4().hex[:8]}.jsonl"
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sampler")
        self._room = BoundedSemaphore(_WAITING)
        self._written = 0

    def permits(self, headers: list[tuple[bytes, bytes]]) -> bool:
        """Whether the request's user agreed."""
        said = {value.strip().lower() for name, value in headers if name.lower() == CONSENT_HEADER.encode()}
        return said == {b"yes"} if said else self._settings.consent == "all"

    def offer(self, asked: bytes, answered: bytes) -> None:
        """Keep it, perhaps; returns at once."""
        if max(len(asked), len(answered)) < _MOST_BYTES and self._room.acquire(blocking=False):
            self._thread.submit(self._consider, asked, answered)

    def close(self) -> None:
        """Finish what is waiting."""
        self._thread.shutdown(wait=True)

    def _consider(self, asked: bytes, answered: bytes) -> None:
        try:
            request, (reply, acceptance) = json.loads(asked), read_answer(answered)
            continued = request["messages"][-1]["role"] == "assistant"  # the reply is half a message
            if reply is not None and not continued and self._chooses(acceptance):
                self._keep([*request["messages"], reply], None if self._redact else request.get("tools"))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            log.info("a conversation is not sampled: %s", error)
        except Exception:  # the user's hook, or the disk: told, and left to the thread, so that serving goes on
            log.exception("a conversation is not sampled")
            raise
        finally:
            self._room.release()

    def _chooses(self, acceptance: float | None) -> bool:
        below = self._settings.acceptance_below
        worst = below is not None and acceptance is not None and acceptance < below
        return worst or self._draws.random() < self._settings.rate

    def _keep(self, messages: list[Any], tools: Any) -> None:
        kept = messages if self._redact is None else self._redact(messages)
        if kept is None:
            return
        line = {"id": uuid.uuid4().hex, "domain": "served", "conversations": kept} | ({"tools": tools} if tools else {})
        text = json.dumps(line, ensure_ascii=False) + "\n"
        if self._written + len(text.encode()) > self._settings.max_bytes:
            return
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path.touch(mode=0o600)
        with self._path.open("a", encoding="utf-8") as file:
            self._written += len(text.encode())
            file.write(text)


def read_answer(payload: bytes) -> tuple[dict[str, Any] | None, float | None]:
    """(the assistant's message, acceptance length) of an answer's first choice.

    Streamed answers are put together; of acceptance their last chunk tells, where there is one of usage. None in place
    of a message where it is no whole reply in words: broken off, without text, or a call of tools. One that a limit or
    a stop string ended says so, by `finish_reason: length`: no end of turn is learned from it.
    """
    if not payload.lstrip().startswith(b"data:"):
        answer = json.loads(payload)
        return _message([answer], "message"), _acceptance(answer)
    *events, last = (line[5:].strip() for line in payload.splitlines() if line.startswith(b"data:"))
    if last != b"[DONE]":
        return None, None
    chunks = [json.loads(event) for event in events]
    return _message(chunks, "delta"), _acceptance(chunks[-1])


def _message(chunks: Iterable[Mapping[str, Any]], part: Literal["message", "delta"]) -> dict[str, Any] | None:
    choices = [choice for chunk in chunks for choice in chunk.get("choices") or () if choice.get("index", 0) == 0]
    parts = [choice.get(part) or {} for choice in choices]
    content = "".join(piece.get("content") or "" for piece in parts)
    reasoning = "".join(piece.get("reasoning") or piece.get("reasoning_content") or "" for piece in parts)
    end: Mapping[str, Any] = next((choice for choice in choices if choice.get("finish_reason")), {})
    reason = end.get("finish_reason")
    if not content or reason not in ("stop", "length") or any(piece.get("tool_calls") for piece in parts):
        return None
    message = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if reason == "length" or isinstance(end.get("stop_reason"), str):
        message["finish_reason"] = "length"
    return message


def _acceptance(answer: Mapping[str, Any]) -> float | None:
    told = (answer.get("metrics") or {}).get("speculative_decoding") or {}
    histogram: list[int] = told.get("acceptance_histogram") or []
    drafts = sum(histogram)
    return 1 + sum(accepted * count for accepted, count in enumerate(histogram)) / drafts if drafts else None


def _collect(into: bytearray, body: bytes) -> None:
    if len(into) < _MOST_BYTES:
        into += body


def _load_hook(name: str | None) -> Redact | None:
    if name is None:
        return None
    module, _, function = name.partition(":")
    try:
        hook: Redact = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise SettingsError(f"{VARIABLE}: redact names {name!r}, which cannot be imported: {error}") from error
    return hook
