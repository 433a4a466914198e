"""What a started engine must show before it takes traffic: it answers, losslessly, and its draft is accepted.

Losslessness needs no second engine. The verifier reads prompt and reply at once, which no draft takes part in, and says
how far each token of the greedy reply lies below its own best: not at all, or by a rounding at a near-tie.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from speculators_core.engine.client import EngineClient, Generation, GenerationRequest
from speculators_core.serving.config import ProbeConfig
from speculators_core.types import Json, StrictModel

PROMPTS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a Python function that reverses a list.",
    "List three uses of copper.",
    "Summarise the story of Cinderella.",
    "How do I boil an egg?",
    "Write a short poem about the sea.",
    "What is 17 times 23? Show the steps.",
)
_WARM_TOKENS = 8


class ProbeResult(StrictModel):
    """What the probe saw."""

    tokens: int = Field(description="generated")
    worst_gap: float = Field(
        description="largest distance (nats) of a reply's token below the verifier's best; 0 where every reply is empty"
    )
    al: float | None = Field(description="acceptance length; None: nothing was drafted")


def probe(client: EngineClient, config: ProbeConfig) -> ProbeResult:
    """Warm the engine up, let it answer the built-in prompts greedily, and let the verifier read its replies.

    Raises: EngineError where it refuses a prompt or dies.
    """
    requests = [
        GenerationRequest(id=str(number), messages=conversation(text), max_tokens=config.max_tokens)
        for number, text in enumerate(PROMPTS[: config.prompts])
    ]
    warm = requests[0].model_copy(update={"max_tokens": _WARM_TOKENS})
    _run(client, [warm])
    before = client.counters()
    replies = _run(client, requests)
    counted = client.counters() - before
    gaps = [
        gap
        for reply in replies
        for gap in client.greedy_gaps((*reply.prompt_token_ids, *reply.token_ids), len(reply.prompt_token_ids))
    ]
    return ProbeResult(
        tokens=sum(len(reply.token_ids) for reply in replies),
        worst_gap=max(gaps, default=0.0),
        al=counted.acceptance_length if counted.drafts else None,
    )


def refusal(found: ProbeResult, config: ProbeConfig, *, speculates: bool, registered_al: float | None) -> str | None:
    """Why an engine with this result may not take traffic; None: it may."""
    if not found.tokens:
        return "it answers every prompt of the probe with nothing"
    if found.worst_gap > config.tie_gap:
        return (
            f"it is not lossless: a greedy reply holds a token {found.worst_gap:.2f} nats below the verifier's best "
            f"({config.tie_gap:g} count as a tie)"
        )
    if not speculates:
        return None
    if found.al is None:
        return "it drafts nothing"
    if registered_al is not None and found.al < config.min_al_share * registered_al:
        return (
            f"acceptance length {found.al:.3f} on the probe is less than {config.min_al_share:.0%} of the "
            f"{registered_al:.3f} that it was registered with"
        )
    return None


def conversation(text: str) -> Json:
    """One user turn."""
    return [{"role": "user", "content": text}]


def _run(client: EngineClient, requests: Sequence[GenerationRequest]) -> list[Generation]:
    return list(client.generate(requests, concurrency=len(requests)))
