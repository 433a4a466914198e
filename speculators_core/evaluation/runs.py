"""One arm on one engine: under which conditions, which server, and greedy replies in order, timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from speculators_core.engine.client import EngineClient, Generation, GenerationRequest
from speculators_core.engine.config import ServerSpec
from speculators_core.engine.runtime import Runtime, probe_runtime
from speculators_core.engine.server import Engine, serve
from speculators_core.errors import EvaluationError
from speculators_core.evaluation.config import EvaluationConfig
from speculators_core.evaluation.records import EvaluationPrompt, prompts_digest
from speculators_core.evaluation.report import Identity
from speculators_core.evaluation.served import speculation
from speculators_core.types import ProgressCallback
from speculators_core.verifier.facts import read_facts

_WARMUP_TOKENS = 8


@dataclass(frozen=True)
class Conditions:
    """What every measured run of a comparison has in common.

    prompts: as prepared; `config` says how many are used · home: state root, for pid files, logs and scratch.
    """

    verifier_dir: Path
    verifier_fingerprint: str
    prompts: Sequence[EvaluationPrompt]
    runtime: Runtime
    config: EvaluationConfig
    home: Path
    trust_remote_code: bool = False
    progress: ProgressCallback | None = None

    def choose(self, limit: int | None = None) -> Sequence[EvaluationPrompt]:
        """The prompts to run; EvaluationError for none, a prompt twice, or one beyond the verifier's context."""
        chosen = self.prompts[: limit or self.config.max_prompts]
        if not chosen:
            raise EvaluationError(
                "there is no prompt to evaluate on", mend="raise data.evaluation_prompts and prepare again"
            )
        if len({prompt.id for prompt in chosen}) != len(chosen):
            raise EvaluationError("two evaluation prompts have one id", mend="prepare the data again")
        longest = max(chosen, key=lambda prompt: len(prompt.prompt_token_ids))
        need = _context(chosen, self.config, self.config.k or 1)
        positions = read_facts(self.verifier_dir).max_position_embeddings
        if need > positions:
            raise EvaluationError(
                f"prompt {longest.id} has {len(longest.prompt_token_ids)} tokens; with {self.config.max_new_tokens} "
                f"new ones it does not fit the verifier's {positions} positions",
                mend="lower evaluation.max_new_tokens or data.max_length",
            )
        return chosen

    def identity(self, draft: str, chosen: Sequence[EvaluationPrompt]) -> Identity:
        """What a run measures: the draft of that digest, on these prompts."""
        info = probe_runtime(self.runtime, home=self.home)
        return Identity(
            draft=draft,
            verifier_fingerprint=self.verifier_fingerprint,
            runtime_key=info.key,
            vllm=info.vllm,
            prompts=prompts_digest(chosen),
        )

    def spec(self, model: Path, chosen: Sequence[EvaluationPrompt], *, k: int | None = None) -> ServerSpec:
        """The server of an arm: the verifier, or with `k` a draft directory that is served alone."""
        config = self.config
        return ServerSpec(
            model=str(model.resolve()),
            dtype=config.dtype,
            max_model_len=_context(chosen, config, k or config.k or 1),
            max_num_seqs=config.concurrency,
            kv_cache_gib=config.kv_cache_gib,
            enforce_eager=config.enforce_eager,
            speculative=None if k is None else speculation(model, k),
            per_request_metrics=k is not None,
            trust_remote_code=self.trust_remote_code,
        )

    @contextmanager
    def serving(self, spec: ServerSpec) -> Iterator[tuple[Engine, EngineClient]]:
        """The server of an arm and a client of it, as long as the block lasts. EngineError when it doesn't start."""
        with (
            serve(self.runtime, spec, home=self.home, startup_timeout_s=self.config.startup_timeout_s) as engine,
            engine.client(timeout_s=self.config.request_timeout_s) as client,
        ):
            yield engine, client


@dataclass(frozen=True)
class Run:
    """Replies in the order of the prompts, and the wall time of all of them together."""

    replies: tuple[Generation, ...]
    seconds: float

    @property
    def tokens(self) -> int:
        """Generated tokens."""
        return sum(len(reply.token_ids) for reply in self.replies)

    def by_id(self) -> dict[str, tuple[int, ...]]:
        """Token ids of each reply."""
        return {reply.id: reply.token_ids for reply in self.replies}


def _context(prompts: Sequence[EvaluationPrompt], config: EvaluationConfig, k: int) -> int:
    return max(len(prompt.prompt_token_ids) for prompt in prompts) + config.max_new_tokens + k + 1


def generation_requests(prompts: Sequence[EvaluationPrompt], config: EvaluationConfig) -> list[GenerationRequest]:
    """Greedy requests that stop at the end of the sequence."""
    return [
        GenerationRequest(id=p.id, prompt_token_ids=tuple(p.prompt_token_ids), max_tokens=config.max_new_tokens)
        for p in prompts
    ]


def warm_up(client: EngineClient, requests: Sequence[GenerationRequest], config: EvaluationConfig) -> None:
    """A few short requests, so that first-time work is neither counted nor timed."""
    short = [
        request.model_copy(update={"max_tokens": min(_WARMUP_TOKENS, request.max_tokens)})
        for request in requests[: config.warmup_prompts]
    ]
    for _ in client.generate(short, concurrency=config.concurrency):
        pass


def run_prompts(
    client: EngineClient,
    requests: Sequence[GenerationRequest],
    concurrency: int,
    on_result: Callable[[Generation], None] | None = None,
) -> Run:
    """All requests, timed together; `on_result` sees each reply, from worker threads."""
    started = time.monotonic()
    replies = tuple(client.generate(requests, concurrency=concurrency, on_result=on_result))
    return Run(replies, time.monotonic() - started)
