"""Prompts without a data set: an instruct model, given its template up to the user's turn, writes the user's turn.

Sampled, seeded and deduplicated; what is thrown away is counted by cause. The method is Magpie's (Xu et al. 2024,
arXiv 2406.08464). The replies come from `regenerate`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field

from speculators_core.data.config import SynthesisConfig
from speculators_core.data.conversations import content_id
from speculators_core.data.splits import near_duplicate_groups, words
from speculators_core.data.template import ChatTemplate
from speculators_core.data.unfinished import keep, part_of, publish, resume
from speculators_core.engine.client import EngineClient, Generation, GenerationRequest
from speculators_core.errors import DataError
from speculators_core.store.manifest import sha256_json
from speculators_core.types import ProgressCallback, StrictModel

log = logging.getLogger(__name__)

_SLOT = "USERTURNGOESHERE"


class SynthesisReport(StrictModel):
    """How many samples it took."""

    samples: int = Field(description="Samples drawn.")
    resumed: int = Field(description="Of these, taken over from an interrupted run.")
    prompts: int = Field(description="Distinct usable prompts written.")
    thrown_away: dict[str, int] = Field(description="Samples thrown away, by cause.")
    share_thrown_away: float = Field(description="Samples thrown away / samples.")


def synthesise(
    client: EngineClient,
    template: ChatTemplate,
    config: SynthesisConfig,
    output: Path,
    *,
    producer: str = "",
    progress: ProgressCallback | None = None,
) -> SynthesisReport:
    """Let the verifier write user turns, and write the distinct ones to `output` as JSON Lines of conversations.

    Draws in rounds until `config.prompts` are found or `max_attempts` are spent; equal seeds draw equal samples on an
    engine that samples reproducibly. Resumable: samples are kept in `<output>.part` and not drawn again; a run with
    other settings, or for another `producer` (the verifier's fingerprint), starts anew.

    Raises:
        DataError: the template shows no place for a user's turn, or no sample was usable.
        EngineError: the engine died.
    """
    prefix, stops = user_turn(template)
    limit = config.max_attempts or 4 * config.prompts
    thrown: Counter[str] = Counter()
    kept: list[str] = []
    drawn, part = 0, part_of(output)
    decisive = config.model_dump(mode="json", include={"max_new_tokens", "temperature", "top_p", "seed"})
    known = resume(part, sha256_json({"config": decisive, "producer": producer}))
    earlier = [Generation.model_validate(record) for record in known.values()]

    def draw(first: int, end: int) -> Iterator[Generation]:
        """Samples of these numbers; those of an interrupted run are its first ones, in order."""
        yield from earlier[first:end]
        requests = _requests(prefix, stops, config, max(first, len(earlier)), end)
        with part.open("a", encoding="utf-8") as stream:
            for generation in client.generate(requests, concurrency=config.concurrency):
                keep(stream, generation.id, generation.model_dump(mode="json"))
                yield generation

    while len(kept) < config.prompts and drawn < limit:
        # The yield is unknown at first: half more than is missing keeps the number of rounds small.
        missing = config.prompts - len(kept)
        fresh: list[str] = []
        for generation in draw(drawn, min(limit, drawn + missing + missing // 2 + 1)):
            drawn += 1
            cause, text = judge(generation, config)
            if cause:
                thrown[cause] += 1
            else:
                fresh.append(text)
            if progress:
                progress(min(len(kept) + len(fresh), config.prompts), config.prompts)
        groups = near_duplicate_groups([*kept, *fresh])
        distinct = [text for i, text in enumerate(fresh, start=len(kept)) if groups[i] == i]
        thrown["duplicate"] += len(fresh) - len(distinct)
        kept += distinct
    if not kept:
        raise DataError(
            f"none of {drawn} samples was a usable prompt ({dict(+thrown)})",
            mend="is the verifier an instruct model? raise max_new_tokens, or bring prompts of your own",
        )
    thrown["beyond_wanted"] += max(0, len(kept) - config.prompts)
    kept = kept[: config.prompts]
    publish(output, (_conversation(text, config.domain) for text in kept))
    report = SynthesisReport(
        samples=drawn,
        resumed=min(drawn, len(earlier)),
        prompts=len(kept),
        thrown_away=dict(sorted((+thrown).items())),
        share_thrown_away=round(1 - len(kept) / drawn, 4),
    )
    log.info("%d prompts of %d samples, %.0f %% thrown away", len(kept), drawn, 100 * report.share_thrown_away)
    return report


def user_turn(template: ChatTemplate) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids of the template up to the user's text, and the ids that end a user's turn.

    Raises:
        DataError: the text cannot be found in the rendering, or nothing but text follows it.
    """
    text = template.text([{"role": "user", "content": _SLOT}])
    before, found, after = text.partition(_SLOT)
    tail = template.tokenise([after])[0] if after else []
    special = set(template.tokenizer.all_special_ids) | set(template.tokenizer.added_tokens_decoder)
    stops = tuple(token for token in tail[:1] if token in special) or tuple(t for t in tail if t in special)[:1]
    if not found or not before or not stops:
        raise DataError(
            "the chat template gives the user's turn no opening, or no special token to end it",
            mend="bring prompts of your own: a .jsonl of conversations with user turns",
        )
    return tuple(template.tokenise([before])[0]), stops


def judge(generation: Generation, config: SynthesisConfig) -> tuple[str | None, str]:
    """Cause for throwing a sample away (None: it is usable), and its text."""
    text = generation.text.strip()
    if generation.finish_reason != "stop":
        return "unfinished", text
    if len(words(text)) < config.min_words:
        return "too_short", text
    if "\ufffd" in text:
        return "broken_text", text
    return None, text


def _requests(
    prefix: tuple[int, ...], stops: tuple[int, ...], config: SynthesisConfig, first: int, end: int
) -> Iterator[GenerationRequest]:
    for number in range(first, end):
        yield GenerationRequest(
            id=f"synthesis-{number}",
            prompt_token_ids=prefix,
            max_tokens=config.max_new_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            seed=(config.seed * 1_000_003 + number) % 2**31,
            stop_token_ids=stops,
        )


def _conversation(text: str, domain: str) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": text}]
    return {"id": content_id(messages), "domain": domain, "messages": messages}
