"""The verifier answers a data set's prompts itself: a draft should learn what this verifier says, not what others said.

User, system and developer turns are kept; each assistant turn is asked for anew, in order, with the new replies as
history. Prompts are rendered here and sent as token ids, and the ids of the replies are kept, so that `prepare` builds
rows out of exactly what was computed. With `capture`, the same requests also leave the hidden states of prompt and
reply (all but the last token, which was never an input) with the connector, and each turn carries its handle.

A conversation is cut, and counted, before a tool call (the recorded result belongs to another call), at the end of the
context, and after a reply that did not end within `max_new_tokens`.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field

from speculators_core.data.config import RegenerationConfig
from speculators_core.data.conversations import Conversation, Message, content_id
from speculators_core.data.report import Dropped
from speculators_core.data.template import ChatTemplate
from speculators_core.data.unfinished import keep, part_of, publish, resume
from speculators_core.engine.client import EngineClient, Generation, GenerationRequest, RequestError
from speculators_core.errors import ConfigError, DataError, EngineError
from speculators_core.store.manifest import sha256_json
from speculators_core.types import Json, ProgressCallback, StrictModel
from speculators_core.verifier.facts import VerifierFacts

log = logging.getLogger(__name__)

OnTurn = Callable[["RegeneratedTurn"], None]


class RegenerationReport(StrictModel):
    """What became of the conversations."""

    conversations: int = Field(description="Conversations asked for.")
    written: int = Field(description="Conversations with at least one new reply.")
    resumed: int = Field(description="Of these, taken over from an interrupted run.")
    replies: int = Field(description="New replies.")
    reply_tokens: int = Field(description="Tokens of the new replies.")
    cut: dict[str, int] = Field(description="Conversations cut short, by cause.")
    dropped: dict[str, int] = Field(description="Conversations left out, by cause.")


@dataclass(frozen=True)
class RegeneratedTurn:
    """One reply: its place, its ids, and where its hidden states lie (`kv_transfer_params` of the answer)."""

    conversation: str
    message: int
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    finish_reason: str | None
    kv_transfer_params: Json = None


@dataclass
class _Outcome:
    messages: list[Message] = field(default_factory=list)
    turns: list[RegeneratedTurn] = field(default_factory=list)
    cut: str | None = None


def regenerate(
    conversations: Iterable[Conversation],
    client: EngineClient,
    template: ChatTemplate,
    facts: VerifierFacts,
    config: RegenerationConfig,
    output: Path,
    *,
    capture: bool = False,
    producer: str = "",
    progress: ProgressCallback | None = None,
    on_turn: OnTurn | None = None,
) -> RegenerationReport:
    """Write conversations with the verifier's own replies to `output` (JSON Lines, in the order of the input).

    Resumable: finished conversations are kept in `<output>.part` and not asked for again; a run with other settings,
    or for another `producer` (the verifier's fingerprint), starts anew. `on_turn` is called in worker threads.

    Args:
        capture: the engine captures, and shall do so for prompt and reply in the same request.

    Raises:
        ConfigError: sampled replies are to be captured in the same request.
        EngineError: the engine died or is away; what was finished is kept.
        DataError: nothing could be answered.
    """
    if capture and config.temperature > 0:
        # vLLM captures through its drafting path, whose sampler repeats tokens on the CPU when it samples
        raise ConfigError(
            f"replies sampled at temperature {config.temperature} cannot be captured in the same request",
            mend="set the temperature to 0, or write them with `draftsmith data regenerate` and capture that file",
        )
    pending = {_key(conversation): conversation for conversation in conversations}
    asked = {**config.model_dump(mode="json", exclude={"concurrency"}), "capture": capture}
    part = part_of(output)
    kept = resume(part, sha256_json({"config": asked, "producer": producer}))
    finished = {key: record for key, record in kept.items() if key in pending}
    resumed, cut, dropped = len(finished), Counter[str](), Dropped()
    worker = _Worker(client, template, facts, config, capture, on_turn)

    with part.open("a", encoding="utf-8") as stream, ThreadPoolExecutor(config.concurrency) as pool:
        futures = {
            pool.submit(worker.answer, conversation): key
            for key, conversation in pending.items()
            if key not in finished
        }
        try:
            for future in as_completed(futures):
                key = futures[future]
                try:
                    outcome = future.result()
                except (RequestError, DataError) as error:
                    cause = "refused_by_engine" if isinstance(error, EngineError) else "refused_by_template"
                    dropped.add(cause, pending[key].origin or pending[key].id, error.what)
                    log.warning("conversation %s: %s", pending[key].id, error)
                    continue
                finished[key] = record = _record(pending[key], outcome)
                keep(stream, key, record)
                if progress:
                    progress(len(finished) + dropped.total(), len(pending))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise

    ordered = [finished[key] for key in pending if key in finished]
    answered = [record for record in ordered if record["turns"]]
    cut.update(record["cut"] for record in ordered if record["cut"])
    dropped["no_reply"] += len(ordered) - len(answered)
    if not answered:
        raise DataError(
            f"none of {len(pending)} conversations could be answered ({dropped.in_words()}, cut {dict(cut)})",
            mend=dropped.mend() or "check that they hold user turns, and raise max_context or max_new_tokens",
        )
    publish(output, answered)
    return RegenerationReport(
        conversations=len(pending),
        written=len(answered),
        resumed=resumed,
        replies=sum(len(record["turns"]) for record in answered),
        reply_tokens=sum(len(turn["token_ids"]) for record in answered for turn in record["turns"]),
        cut=dict(sorted(cut.items())),
        dropped=dict(sorted((+dropped).items())),
    )


class _Worker:
    """Answers one conversation after the other; several threads share one worker."""

    def __init__(
        self,
        client: EngineClient,
        template: ChatTemplate,
        facts: VerifierFacts,
        config: RegenerationConfig,
        capture: bool,
        on_turn: OnTurn | None,
    ) -> None:
        self.client, self.template, self.facts, self.config, self.on_turn = client, template, facts, config, on_turn
        self.capture = capture
        self.context = min(config.max_context or facts.max_position_embeddings, facts.max_position_embeddings)

    def answer(self, conversation: Conversation) -> _Outcome:
        """Every assistant turn of a conversation, asked for anew."""
        outcome = _Outcome()
        asked = False
        for message in (*conversation.messages, None):
            history = outcome.messages
            last = history[-1]["role"] if history else None
            if message is None or message["role"] == "assistant":
                if message is not None and message.get("tool_calls"):
                    outcome.cut = "tool_call"
                elif asked and last != "assistant":
                    self._reply(conversation, outcome)
                elif message is not None and not asked:
                    history.append(message)  # an opening by the assistant is context
                if outcome.cut:
                    break
            elif message["role"] == "tool":
                outcome.cut = "tool_call"
                break
            else:
                asked = asked or message["role"] == "user"
                history.append(message)
        if outcome.turns:  # what follows the last reply cannot be learned from
            outcome.messages = outcome.messages[: outcome.turns[-1].message + 1]
        return outcome

    def _reply(self, conversation: Conversation, outcome: _Outcome) -> None:
        prompt = self.template.ids(outcome.messages, tools=conversation.tools, add_generation_prompt=True)
        room = self.context - len(prompt)
        if room < 1:
            outcome.cut = "context"
            return
        config, index = self.config, len(outcome.messages)
        name = f"{conversation.id}-{index}"
        request = GenerationRequest(
            id=name,
            prompt_token_ids=tuple(prompt),
            max_tokens=min(config.max_new_tokens, room),
            temperature=config.temperature,
            top_p=config.top_p,
            seed=_seed(config.seed, _key(conversation), index) if config.temperature else None,
            stop_token_ids=self.facts.eos_token_id,
            kv_transfer_params={"include_output_tokens": True} if self.capture else None,
        )
        generation: Generation = next(iter(self.client.generate([request], concurrency=1)))
        turn = RegeneratedTurn(
            conversation=conversation.id,
            message=index,
            prompt_token_ids=tuple(prompt),
            token_ids=generation.token_ids,
            finish_reason=generation.finish_reason,
            kv_transfer_params=generation.kv_transfer_params if self.capture else None,
        )
        message: dict[str, Any] = {"role": "assistant", "content": generation.text}
        if generation.finish_reason != "stop":
            message["finish_reason"] = outcome.cut = "length"
        outcome.messages.append(message)
        outcome.turns.append(turn)
        if self.on_turn:
            self.on_turn(turn)


def _record(conversation: Conversation, outcome: _Outcome) -> dict[str, Any]:
    """A line of the output: a conversation that `read_conversations` reads back with its exact ids."""
    turns = []
    for turn in outcome.turns:
        line: dict[str, Any] = {
            "message": turn.message,
            "prompt_token_ids": list(turn.prompt_token_ids),
            "token_ids": list(turn.token_ids),
            "finish_reason": turn.finish_reason,
        }
        if turn.kv_transfer_params is not None:
            line["kv_transfer_params"] = turn.kv_transfer_params
        turns.append(line)
    record: dict[str, Any] = {
        "id": conversation.id,
        "domain": conversation.domain,
        "messages": outcome.messages,
        "turns": turns,
        "cut": outcome.cut,
    }
    return {**record, "tools": list(conversation.tools)} if conversation.tools else record


def _key(conversation: Conversation) -> str:
    """Identity of what is asked: the replies in the data have no part in it."""
    asked = [message if message["role"] != "assistant" else {"role": "assistant"} for message in conversation.messages]
    return f"{conversation.id}:{content_id([*asked, {'tools': conversation.tools}])}"


def _seed(seed: int, key: str, index: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{key}:{index}".encode()).digest()[:4], "big") >> 1
