"""Is speculation lossless? Greedy replies with and without it, and how close a call each difference was.

In reduced precision the verifier does not quite agree with itself: another batch rounds otherwise, and near-ties
flip. So replies with a draft are held against what two runs without one do, and at each first divergence the engine
is asked for the logits after the common prefix: a difference that is no tie is a fault, however rare.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from speculators_core.engine.client import EngineClient, Generation, GenerationRequest
from speculators_core.errors import EvaluationError
from speculators_core.evaluation.report import Divergence, Lossless
from speculators_core.evaluation.statistics import binomial_shortfall

Tokens = Sequence[int]
_BEST = 5  # logits asked for at a divergence
_SIGNIFICANT = 0.001
"""Below it the share of identical replies counts as lower. Small on purpose: verifying K + 1 tokens a sequence makes
matrices of other shapes, which round otherwise somewhat more often than two plain runs differ. That is no loss; the
ties are the sharp test, and the share guards against a gross one."""


def first_divergence(ours: Tokens, theirs: Tokens) -> int | None:
    """Index of the first token that differs (one reply may just end earlier), or None."""
    for index, (a, b) in enumerate(zip_longest(ours, theirs)):
        if a != b:
            return index
    return None


def repeated_share(tokens: Tokens, n: int) -> float:
    """Share of a reply's n-grams that occurred in it before; 0.0 for replies shorter than n tokens."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def find_divergences(
    client: EngineClient,
    prompts: Mapping[str, Tokens],
    ours: Mapping[str, Tokens],
    theirs: Mapping[str, Tokens],
    *,
    concurrency: int,
) -> tuple[Divergence, ...]:
    """First divergences of two sets of greedy replies, with logit gaps asked of a running engine.

    Args:
        client: an engine that serves the verifier; its counters move.
        prompts: token ids of each prompt, by id.
        ours: token ids of the replies to compare, by the same ids.
        theirs: replies to hold them against; there may be more.
    """
    parted = {name: at for name in ours if (at := first_divergence(ours[name], theirs[name])) is not None}
    requests = [
        GenerationRequest(
            id=name, prompt_token_ids=(*prompts[name], *ours[name][:position]), max_tokens=1, logprobs=_BEST
        )
        for name, position in parted.items()
    ]
    found = client.generate(requests, concurrency=concurrency)
    return tuple(
        _divergence(generation, parted[generation.id], ours[generation.id], theirs[generation.id])
        for generation in found
    )


def judge(
    divergences: Sequence[Divergence],
    baseline_divergences: Sequence[Divergence],
    *,
    prompts: int,
    baseline_prompts: int,
    tie_gap: float,
) -> Lossless:
    """Put counts and gaps together; see `Lossless` for the rule."""
    identical, baseline_identical = prompts - len(divergences), baseline_prompts - len(baseline_divergences)
    shortfall = binomial_shortfall(identical, prompts, baseline_identical, baseline_prompts)
    ties = all(divergence.gap is not None and divergence.gap <= tie_gap for divergence in divergences)
    return Lossless(
        prompts=prompts,
        identical=identical,
        baseline_prompts=baseline_prompts,
        baseline_identical=baseline_identical,
        shortfall_p=shortfall,
        tie_gap=tie_gap,
        divergences=tuple(divergences),
        baseline_divergences=tuple(baseline_divergences),
        holds=ties and shortfall >= _SIGNIFICANT,
    )


def _divergence(generation: Generation, position: int, ours: Tokens, theirs: Tokens) -> Divergence:
    best = _best_logprobs(generation)
    ordered = sorted(best.values(), reverse=True)
    top2 = ordered[0] - ordered[1] if len(ordered) > 1 else None
    gap = None
    if position < min(len(ours), len(theirs)) and {ours[position], theirs[position]} <= best.keys():
        gap = abs(best[ours[position]] - best[theirs[position]])
    return Divergence(id=generation.id, position=position, gap=gap, top2_gap=top2)


def _best_logprobs(generation: Generation) -> dict[int, float]:
    """token id -> log-probability of the first generated position."""
    logprobs: Any = generation.logprobs
    try:
        return {int(name.removeprefix("token_id:")): float(x) for name, x in logprobs["top_logprobs"][0].items()}
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise EvaluationError(
            "the engine did not return log-probabilities of the form that vLLM uses",
            mend="look at the runtime's version",
        ) from error
