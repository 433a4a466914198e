"""Measured runs: one engine, the prepared prompts, greedy replies, and what the engine counted.

A run leaves a directory, written whole or not at all, that is an artifact of its own: a baseline belongs to
verifier, runtime and prompts and serves every draft that is measured on them.

    measure_baseline → baseline.json, replies.safetensors (token ids, so that later drafts can be held against them)
    measure_draft    → measurement.json, per_prompt.jsonl (counts only)
    measure_ngram    → the same of vLLM's n-gram look-up, which needs no draft
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from speculators_core.engine.client import EngineClient, Generation
from speculators_core.engine.metrics import SpecDecodeCounters
from speculators_core.engine.server import ServerSpec
from speculators_core.errors import EvaluationError
from speculators_core.evaluation.config import EvaluationConfig
from speculators_core.evaluation.lossless import find_divergences, repeated_share
from speculators_core.evaluation.records import (
    Baseline,
    EvaluationPrompt,
    Measurement,
    prompts_digest,
    read_baseline,
    read_replies,
    write_measurement,
    write_replies,
)
from speculators_core.evaluation.report import Divergence, Identity, PromptCounts, write_text
from speculators_core.evaluation.runs import Conditions, Run, generation_requests, run_prompts, warm_up
from speculators_core.evaluation.served import draft_digest, drafted_tokens, require_served, served_directory
from speculators_core.types import ProgressCallback

log = logging.getLogger(__name__)
_SETTLE_S = 5.0
NGRAM = "ngram"
"""vLLM's name of the method, and what stands for a draft in its measurement."""
NGRAM_TOKENS = 3


def measure_baseline(conditions: Conditions, output: Path) -> Baseline:
    """Serve the verifier alone: all prompts once, some again in another order; write what was found to `output`.

    Raises:
        EngineError: the engine did not start, or died.
        EvaluationError: no prompt, a prompt twice, or one that does not fit the verifier's context.
    """
    config, chosen = conditions.config, conditions.choose()
    requests = generation_requests(chosen, config)
    repeated = random.Random(config.seed).sample(requests, min(config.repeat_prompts, len(requests)))
    report = _Progress(conditions.progress, len(requests) + len(repeated))
    started = time.monotonic()
    with conditions.serving(conditions.spec(conditions.verifier_dir, chosen)) as (engine, client):
        engine_seconds = time.monotonic() - started
        warm_up(client, requests, config)
        first = run_prompts(client, requests, config.concurrency, report)
        second = run_prompts(client, repeated, config.concurrency, report)
        divergences = find_divergences(
            client, _token_ids(chosen), second.by_id(), first.by_id(), concurrency=config.concurrency
        )
    baseline = Baseline(
        verifier_fingerprint=conditions.verifier_fingerprint,
        runtime_key=engine.info.key,
        vllm=engine.info.vllm,
        prompts=prompts_digest(chosen),
        count=len(chosen),
        max_new_tokens=config.max_new_tokens,
        concurrency=config.concurrency,
        tokens=first.tokens,
        seconds=first.seconds,
        engine_seconds=engine_seconds,
        repeated=len(repeated),
        divergences=divergences,
    )
    output.mkdir(parents=True, exist_ok=True)
    write_replies(output / "replies.safetensors", [reply.token_ids for reply in first.replies])
    write_text(output / "baseline.json", baseline.model_dump_json(indent=2) + "\n")
    log.info("baseline: %d tokens at %.0f tokens/s", baseline.tokens, baseline.tokens_per_second)
    return baseline


def measure_draft(
    draft_dir: Path, conditions: Conditions, output: Path, *, baseline: Path | None = None
) -> Measurement:
    """Serve the draft with its verifier, run the prompts once, and write what the engine counted to `output`.

    Args:
        baseline: directory of `measure_baseline` under the same conditions: replies are held against its; without
            one losslessness and speed stay unknown.

    Raises:
        EngineError: the engine did not start, or died.
        EvaluationError: prompts as in `measure_baseline`, a baseline of something else, nothing drafted, or counters
            that are not this run's alone.
    """
    config, chosen = conditions.config, conditions.choose()
    k = config.k or drafted_tokens(draft_dir)
    identity = conditions.identity(draft_digest(draft_dir), chosen)
    require_served(conditions.runtime, identity.draft)
    expected = None if baseline is None else _expected_replies(baseline, chosen, config, identity)
    with served_directory(draft_dir, conditions.verifier_dir, conditions.home / "scratch") as served:
        return _measure(conditions, chosen, conditions.spec(served, chosen, k=k), identity, k, expected, output)


def measure_ngram(conditions: Conditions, output: Path) -> Measurement:
    """The training-free baseline: the verifier drafts from its own context, by vLLM's n-gram look-up.

    It drafts only where the last tokens occurred before, so AL = 1 + accepted / drafts speaks of those steps alone:
    compare `Measurement.tokens_per_step`. No draft at all is a result, not an error.

    Raises:
        EngineError: the engine did not start, or died.
        EvaluationError: the runtime is a server of somebody else, prompts as in `measure_baseline`, or counters that
            are not this run's alone.
    """
    if conditions.runtime.url is not None:
        raise EvaluationError(
            f"the server at {conditions.runtime.url} was not started with n-gram look-up by us",
            mend="give `runtime` an interpreter to measure the training-free baseline",
        )
    config, chosen = conditions.config, conditions.choose()
    k = config.k or NGRAM_TOKENS
    identity = conditions.identity(NGRAM, chosen)
    look_up = {"method": NGRAM, "num_speculative_tokens": k, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    spec = conditions.spec(conditions.verifier_dir, chosen, k=k).model_copy(update={"speculative": look_up})
    return _measure(conditions, chosen, spec, identity, k, None, output)


def _measure(
    conditions: Conditions,
    chosen: Sequence[EvaluationPrompt],
    spec: ServerSpec,
    identity: Identity,
    k: int,
    expected: Mapping[str, Sequence[int]] | None,
    output: Path,
) -> Measurement:
    config = conditions.config
    requests = generation_requests(chosen, config)
    started = time.monotonic()
    with conditions.serving(spec) as (_, client):
        engine_seconds = time.monotonic() - started
        warm_up(client, requests, config)
        before = _settled_counters(client)
        run = run_prompts(client, requests, config.concurrency, _Progress(conditions.progress, len(requests)))
        counted = _settled_counters(client) - before
        divergences = None
        if expected is not None:
            divergences = find_divergences(
                client, _token_ids(chosen), run.by_id(), expected, concurrency=config.concurrency
            )
    if len(counted.accepted_per_position) not in (0, k):
        raise EvaluationError(
            f"the server drafts {len(counted.accepted_per_position)} tokens a step, and evaluation.k is {k}",
            mend="set evaluation.k to the server's, or start it with what `draftsmith runtime flags --draft` prints",
        )
    sometimes = identity.draft == NGRAM
    per_prompt = _count_prompts(chosen, run, k, divergences, config, sometimes=sometimes)
    _require_same_counts(counted, per_prompt, sometimes=sometimes)
    measurement = Measurement(
        identity=identity,
        k=k,
        count=len(chosen),
        max_new_tokens=config.max_new_tokens,
        concurrency=config.concurrency,
        drafts=counted.drafts,
        draft_tokens=counted.draft_tokens,
        accepted=counted.accepted,
        accepted_per_position=_padded(counted.accepted_per_position, k),
        tokens=run.tokens,
        seconds=run.seconds,
        engine_seconds=engine_seconds,
        divergences=divergences,
        per_prompt=per_prompt,
    )
    write_measurement(output, measurement)
    return measurement


def _token_ids(prompts: Sequence[EvaluationPrompt]) -> dict[str, Sequence[int]]:
    return {prompt.id: prompt.prompt_token_ids for prompt in prompts}


def _settled_counters(client: EngineClient) -> SpecDecodeCounters:
    """The counters once they stand still: the server updates them just after it has answered."""
    deadline = time.monotonic() + _SETTLE_S
    found = client.counters()
    while time.monotonic() < deadline:
        time.sleep(0.1)
        again = client.counters()
        if again == found:
            return found
        found = again
    raise EvaluationError(
        "the engine drafts although nobody asks", mend="keep other requests away while it is measured"
    )


def _count_prompts(
    prompts: Sequence[EvaluationPrompt],
    run: Run,
    k: int,
    divergences: Sequence[Divergence] | None,
    config: EvaluationConfig,
    *,
    sometimes: bool = False,
) -> tuple[PromptCounts, ...]:
    parted = None if divergences is None else {divergence.id for divergence in divergences}
    return tuple(
        _prompt_counts(prompt, reply, k, None if parted is None else prompt.id not in parted, config, sometimes)
        for prompt, reply in zip(prompts, run.replies, strict=True)
    )


def _prompt_counts(
    prompt: EvaluationPrompt,
    reply: Generation,
    k: int,
    identical: bool | None,
    config: EvaluationConfig,
    sometimes: bool = False,
) -> PromptCounts:
    found: Any = reply.spec_metrics
    if found is None and (sometimes or len(reply.token_ids) <= 1):  # nothing was drafted
        found = {"acceptance_histogram": [0]}
    try:
        # histogram[j]: drafts of which exactly j tokens were accepted
        histogram = [int(count) for count in found["acceptance_histogram"]]
    except (KeyError, TypeError, ValueError) as error:
        raise EvaluationError(
            f"the engine did not say what was accepted in its reply to {prompt.id}",
            mend="use a vLLM that has --per-request-spec-decode-metrics (0.32 does); a server of somebody else must be "
            "started with it",
        ) from error
    return PromptCounts(
        id=prompt.id,
        domain=prompt.domain,
        tokens=len(reply.token_ids),
        drafts=sum(histogram),
        accepted=sum(j * count for j, count in enumerate(histogram)),
        accepted_per_position=_padded(tuple(sum(histogram[i:]) for i in range(1, len(histogram))), k),
        repeated_share=repeated_share(reply.token_ids, config.loop_ngram),
        identical=identical,
    )


def _require_same_counts(
    counted: SpecDecodeCounters, per_prompt: Sequence[PromptCounts], *, sometimes: bool = False
) -> None:
    drafts, accepted = sum(row.drafts for row in per_prompt), sum(row.accepted for row in per_prompt)
    if not counted.drafts and not sometimes:
        raise EvaluationError(
            "the engine drafted nothing", mend="look in the engine's log whether the draft was loaded"
        )
    if (drafts, accepted) != (counted.drafts, counted.accepted):
        raise EvaluationError(
            f"the engine's counters ({counted.drafts} drafts, {counted.accepted} accepted) are not the sum over the "
            f"prompts ({drafts}, {accepted}): somebody else's requests, or a request sent twice, were counted",
            mend="keep other requests away from the engine while it is measured",
        )


def _expected_replies(
    directory: Path, prompts: Sequence[EvaluationPrompt], config: EvaluationConfig, identity: Identity
) -> Mapping[str, Sequence[int]]:
    baseline = read_baseline(directory)
    for name in ("verifier_fingerprint", "runtime_key", "prompts"):
        if getattr(baseline, name) != getattr(identity, name):
            raise EvaluationError(
                f"the baseline at {directory} is of another {name.replace('_', ' ')}",
                mend="measure the baseline on this evaluation's verifier, runtime and prompts",
            )
    for name in ("max_new_tokens", "concurrency"):
        if getattr(baseline, name) != getattr(config, name):
            raise EvaluationError(
                f"the baseline at {directory} was run with another {name}", mend="measure both with one config"
            )
    replies = read_replies(directory / "replies.safetensors")
    return {prompt.id: reply for prompt, reply in zip(prompts, replies, strict=True)}


def _padded(values: Sequence[int], k: int) -> tuple[int, ...]:
    return (*values, *(0,) * (k - len(values)))[:k]


class _Progress:
    """Counts results from several threads and hands (done, total) on."""

    def __init__(self, callback: ProgressCallback | None, total: int) -> None:
        self._callback, self._total, self._done, self._lock = callback, total, 0, threading.Lock()

    def __call__(self, result: Generation) -> None:
        with self._lock:
            self._done += 1
            if self._callback is not None:
                self._callback(self._done, self._total)
