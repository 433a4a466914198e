"""One arm on one engine: which prompts, which server, and greedy replies in order, timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from speculators_core.engine.client import EngineClient, Generation, GenerationRequest
from speculators_core.engine.server import ServerSpec
from speculators_core.errors import EvaluationError
from speculators_core.evaluation.config import EvaluationConfig
from speculators_core.evaluation.records import EvaluationPrompt
from speculators_core.verifier.facts import read_facts

_WARMUP_TOKENS = 8


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


def choose(
    prompts: Sequence[EvaluationPrompt], verifier_dir: Path, config: EvaluationConfig
) -> Sequence[EvaluationPrompt]:
    """The prompts to run; EvaluationError for none, a prompt twice, or one beyond the verifier's context."""
    chosen = prompts[: config.max_prompts]
    if not chosen:
        raise EvaluationError(
            "there is no prompt to evaluate on", mend="raise data.evaluation_prompts and prepare again"
        )
    if len({prompt.id for prompt in chosen}) != len(chosen):
        raise EvaluationError("two evaluation prompts have one id", mend="prepare the data again")
    longest = max(chosen, key=lambda prompt: len(prompt.prompt_token_ids))
    need, limit = _context(chosen, config, config.k or 1), read_facts(verifier_dir).max_position_embeddings
    if need > limit:
        raise EvaluationError(
            f"prompt {longest.id} has {len(longest.prompt_token_ids)} tokens; with {config.max_new_tokens} new ones it "
            f"does not fit the verifier's {limit} positions",
            mend="lower evaluation.max_new_tokens or data.max_length",
        )
    return chosen


def _context(prompts: Sequence[EvaluationPrompt], config: EvaluationConfig, k: int) -> int:
    return max(len(prompt.prompt_token_ids) for prompt in prompts) + config.max_new_tokens + k + 1


def generation_requests(prompts: Sequence[EvaluationPrompt], config: EvaluationConfig) -> list[GenerationRequest]:
    """Greedy requests that stop at the end of the sequence."""
    return [
        GenerationRequest(id=p.id, prompt_token_ids=tuple(p.prompt_token_ids), max_tokens=config.max_new_tokens)
        for p in prompts
    ]


def server_spec(
    model: str,
    prompts: Sequence[EvaluationPrompt],
    config: EvaluationConfig,
    *,
    k: int | None = None,
    trust_remote_code: bool = False,
) -> ServerSpec:
    """The server of an arm: the verifier, or with `k` a draft directory that is served alone."""
    return ServerSpec(
        model=model,
        dtype=config.dtype,
        max_model_len=_context(prompts, config, k or config.k or 1),
        max_num_seqs=config.concurrency,
        kv_cache_gib=config.kv_cache_gib,
        enforce_eager=config.enforce_eager,
        # a draft served alone brings its method and verifier; this lays K over its own
        speculative=None if k is None else {"num_speculative_tokens": k},
        per_request_metrics=k is not None,
        trust_remote_code=trust_remote_code,
    )


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
    config: EvaluationConfig,
    on_result: Callable[[Generation], None] | None = None,
) -> Run:
    """All requests, timed together; `on_result` sees each reply, from worker threads."""
    started = time.monotonic()
    replies = tuple(client.generate(requests, concurrency=config.concurrency, on_result=on_result))
    return Run(replies, time.monotonic() - started)
