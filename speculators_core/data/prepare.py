"""Conversations in, token rows with loss masks out.

Everything that can be wrong with the input is looked for before the first token is made: the verifier, its template,
the sources, an assistant turn, the context length. What is left out afterwards is counted by cause.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from speculators_core.data.config import DataConfig
from speculators_core.data.conversations import (
    Conversation,
    ExactTurn,
    canonical,
    check_sources,
    engine_messages,
    hub_identity,
    read_conversations,
    source_files,
    trimmed,
)
from speculators_core.data.masking import Renderings, TokenRow, Turn, clip, merge, renderings, turn_of
from speculators_core.data.report import EXAMPLE, Dropped, PreparationReport
from speculators_core.data.rows import Prompt, RowRecord, RowWriter, Sample
from speculators_core.data.splits import assign, seeded_hash
from speculators_core.data.template import ChatTemplate
from speculators_core.errors import DataError
from speculators_core.store.manifest import sha256_json
from speculators_core.types import Json, ProgressCallback, Split
from speculators_core.verifier.facts import VerifierFacts, read_facts
from speculators_core.verifier.hashes import HashCache

log = logging.getLogger(__name__)

CHUNK = 128  # conversations tokenised in one call
SPARED_OF = 4  # one conversation of so many, at most, is held back for evaluation
SAMPLES = 64  # about as many conversations, spread evenly, keep their messages for the comparison with the engine


@dataclass
class _Tally:
    """Counters that are filled on the way."""

    dropped: Dropped
    domains: Counter[str]
    records: int = 0
    used: int = 0
    truncated: int = 0
    exact: int = 0
    realigned: int = 0
    shared: int = 0
    fanned_out: int = 0


def prepare(
    config: DataConfig,
    verifier_dir: Path,
    output: Path,
    *,
    when_read: Callable[[], None] | None = None,
    progress: ProgressCallback | None = None,
) -> PreparationReport:
    """Turn conversations into rows for the verifier, and write them to `output` (see `data.rows`).

    Deterministic: equal sources, verifier and config give equal bytes. Progress counts conversations.
    `when_read` is called once all sources are read; what it raises ends the work before anything is written.

    Raises:
        VerifierError: not a model directory, no tokenizer, no chat template.
        DataError: a source is missing, nothing usable in it, no assistant turn, no supervised token, or rows are to be
            longer than the verifier's context.
    """
    facts = read_facts(verifier_dir)
    context = facts.max_position_embeddings
    if config.max_length > context:
        raise DataError(
            f"data.max_length is {config.max_length}, but the verifier's context ends at {context} tokens",
            mend=f"set data.max_length to at most {context}",
        )
    check_sources(config.sources)
    template = ChatTemplate.load(verifier_dir, config.template_kwargs)
    tally = _Tally(Dropped(), Counter())
    conversations = _gather(config, tally)
    if when_read is not None:
        when_read()
    splits, groups = assign(
        [conversation.first_user_turn for conversation in conversations],
        evaluation=_held_back(config.evaluation_prompts, len(conversations)),
        validation_share=config.validation_share,
        seed=config.seed,
    )

    writer, prompts, samples = RowWriter(), list[Prompt](), list[Sample]()
    prompted: dict[int, str] = {}
    total, done = len(conversations), 0
    sampled = frozenset(conversation.id for conversation in conversations[:: max(1, total // SAMPLES)])
    for chunk in _chunks(list(zip(conversations, splits, groups, strict=True))):
        turns = _turns([conversation for conversation, _, _ in chunk], template, facts, config.reply_cap, tally)
        for (conversation, split, group), found in zip(chunk, turns, strict=True):
            if split == "evaluation":
                if group in prompted:  # near-duplicates of a held-back prompt are used for nothing
                    what = f"asks nearly what {prompted[group]} does, whose prompt is held back"
                    tally.dropped.add("near_duplicate_of_evaluation", conversation.origin, what)
                elif prompt := _prompt(conversation, found, config, tally):
                    prompts.append(prompt)
                    prompted[group] = conversation.origin
                continue
            keep = samples if conversation.id in sampled else None
            _add_rows(conversation, split, found, config, tally, writer, keep)
        done += len(chunk)
        if progress:
            progress(done, total)

    report = _report(writer, prompts, tally, len(conversations), groups)
    _require_supervision(report, tally.dropped)
    # names of files stay out: equal data under another name gives equal bytes
    writer.write(output, prompts, samples, report.model_dump(mode="json", exclude={"first_dropped"}))
    if tally.dropped:
        log.warning("read %d, used %d, left out: %s", report.records, report.used, tally.dropped.in_words())
    log.info("%d rows, %d tokens, %d prompts held back", report.rows, report.tokens, len(prompts))
    return report


def digest_sources(sources: Sequence[str], *, home: Path | None) -> str:
    """sha256 of what the sources hold, wherever they lie: file contents in order; a hub's data set by its commit.

    Raises:
        DataError: a source is missing or of an unknown form.
    """
    check_sources(sources)
    cache = HashCache.of_home(home)
    found: list[Json] = []
    for source in sources:
        if source.startswith("hf:"):
            found.append(hub_identity(source))
        else:
            found.append([cache.of(file) for file in source_files(source)])
    cache.save()
    return sha256_json(found)


def require_unchanged(sources: Sequence[str], digest: str, *, home: Path | None) -> None:
    """See, once the sources are read, that they still are what was digested before.

    Raises:
        DataError: somebody wrote to them meanwhile; what was made of them would bear the name of other data.
    """
    if digest_sources(sources, home=home) != digest:
        raise DataError(
            f"{', '.join(sources)} changed while it was read",
            mend="run the same command again; where somebody writes there all the time, copy it and name the copy in "
            "data.sources",
        )


def _gather(config: DataConfig, tally: _Tally) -> list[Conversation]:
    """Conversations that can be learned from, duplicates removed, in the order of the sources."""
    seen: set[str] = set()
    kept: list[Conversation] = []
    dropped, read = tally.dropped, 0
    for conversation in read_conversations(config.sources, dropped):
        read += 1
        if not conversation.assistant_turns():
            dropped.add("no_assistant_turn", conversation.origin)
            continue
        conversation = trimmed(conversation)
        content = seeded_hash(canonical([conversation.messages, conversation.tools]), 0)
        if content in seen:
            dropped.add("duplicate", conversation.origin)
            continue
        seen.add(content)
        kept.append(conversation)
    _require_replies(config.sources, read, len(kept), dropped)
    tally.records = len(kept) + dropped.total()
    drawn = draw(kept, config)
    if len(drawn) < len(kept):
        dropped["beyond_max_rows"] += len(kept) - len(drawn)
    return drawn


def draw(conversations: Sequence[Conversation], config: DataConfig) -> list[Conversation]:
    """At most `max_rows` of the conversations, by seeded hash, in their order."""
    count = len(conversations) if config.max_rows is None else config.max_rows
    by_hash = sorted(range(len(conversations)), key=lambda i: seeded_hash(f"{conversations[i].id}\n{i}", config.seed))
    return [conversations[i] for i in sorted(by_hash[:count])]


def check_content(config: DataConfig) -> None:
    """Whether there is anything to learn from; reads no further than the first usable conversation.

    Raises:
        DataError: no usable conversation, or none with an assistant turn where replies are not to be made.
    """
    dropped, read = Dropped(), 0
    for conversation in read_conversations(config.sources, dropped):
        read += 1
        if conversation.assistant_turns() or config.replies == "regenerate":
            return
        dropped.add("no_assistant_turn", conversation.origin)
    _require_replies(config.sources, read, 0, dropped)


def _require_replies(sources: Sequence[str], read: int, kept: int, dropped: Dropped) -> None:
    where = ", ".join(sources)
    if not read:
        raise DataError(
            f"no usable conversation in {where}: {dropped.in_words() or 'no record at all'}",
            mend=dropped.mend() or EXAMPLE,
        )
    if not kept:
        raise DataError(
            f"no assistant turn follows a user turn in any of the {read} conversations of {where}: "
            f"{dropped.in_words()}",
            mend=dropped.mend(),
        )


def _held_back(wanted: int, conversations: int) -> int:
    """Evaluation prompts that the data can spare: at most a quarter of it."""
    spare = conversations // SPARED_OF
    if wanted > spare:
        log.warning(
            "%d prompts are held back, not %d: at most a quarter of the %d conversations; %d would give %d",
            *(spare, wanted, conversations, SPARED_OF * wanted, wanted),
        )
    return min(wanted, spare)


def _chunks(
    items: Sequence[tuple[Conversation, Split, int]],
) -> Iterator[list[tuple[Conversation, Split, int]]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, CHUNK)):
        yield chunk


def _turns(
    conversations: Sequence[Conversation],
    template: ChatTemplate,
    facts: VerifierFacts,
    reply_cap: int | None,
    tally: _Tally,
) -> list[list[Turn]]:
    """The located replies of each conversation; all renderings of the chunk are tokenised together."""
    rendered: list[list[Renderings]] = []
    for conversation in conversations:
        try:
            rendered.append(renderings(conversation, template))
        except DataError as error:
            tally.dropped.add("refused_by_template", conversation.origin, error.what)
            log.debug("conversation %s: %s", conversation.id, error)
            rendered.append([])
    texts = [text for items in rendered for item in items for text in (item.prompt, item.full)]
    ids = iter(template.tokenise(texts))
    ends = frozenset(facts.eos_token_id)
    found: list[list[Turn]] = []
    for conversation, items in zip(conversations, rendered, strict=True):
        exact = {turn.message: turn for turn in conversation.exact}
        turns: list[Turn] = []
        for item in items:
            prompt, full = next(ids), next(ids)
            given = _exact_turn(exact.get(item.message), prompt, conversation.origin, facts, tally)
            turn = given or turn_of(item, prompt, full, template, ends)
            if turn is None:
                tally.dropped.add("no_boundary", conversation.origin)
                continue
            if not turn.exact:
                turn = replace(turn, reply=_spoken(conversation, turn, ends, reply_cap))
            tally.exact += turn.exact
            tally.realigned += not turn.aligned
            turns.append(turn)
        found.append(turns)
    return found


def _exact_turn(
    exact: ExactTurn | None, prompt: Sequence[int], origin: str, facts: VerifierFacts, tally: _Tally
) -> Turn | None:
    """An engine's own ids, provided that they answer what this verifier's template renders today."""
    if exact is None or not exact.token_ids:
        return None
    if exact.prompt_token_ids != tuple(prompt) or max(exact.token_ids) >= facts.vocab_size or min(exact.token_ids) < 0:
        tally.dropped.add("stale_exact_ids", origin)  # the reply is rendered from its text instead
        return None
    return Turn(exact.message, list(exact.prompt_token_ids), list(exact.token_ids), exact=True)


def _spoken(conversation: Conversation, turn: Turn, ends: frozenset[int], reply_cap: int | None) -> Sequence[int]:
    """The reply's ids. One that was cut off did not end: the template's end-of-turn id is not the verifier's."""
    kept = list(turn.reply)
    while kept and kept[-1] in ends:
        kept.pop()
    capped = reply_cap is not None and len(kept) >= reply_cap
    if kept and (capped or conversation.messages[turn.message].get("finish_reason") == "length"):
        return kept
    return turn.reply


def _add_rows(
    conversation: Conversation,
    split: Split,
    turns: Sequence[Turn],
    config: DataConfig,
    tally: _Tally,
    writer: RowWriter,
    samples: list[Sample] | None,
) -> None:
    rows, before = merge(turns), len(writer.records)
    tally.fanned_out += len(rows) > 1
    for number, row in enumerate(rows):
        kept = _fit(row, conversation.origin, config, tally)
        if kept is None:
            continue
        tally.shared += len(kept.turns) > 1
        tally.domains[conversation.domain] += 1
        identity = conversation.id if len(rows) == 1 else f"{conversation.id}#{number}"
        record = RowRecord(
            identity, conversation.domain, split, conversation.id, tuple(turn.message for turn in kept.turns)
        )
        index = writer.add(record, kept.input_ids, kept.loss_mask)
        if samples is not None:
            last = kept.turns[-1]
            samples.append(
                Sample(
                    row=index,
                    messages=tuple(engine_messages(conversation.messages[: last.message + 1])),
                    tools=list(conversation.tools) if conversation.tools else None,
                    prompt_length=len(last.prompt) if last.aligned else None,
                    exact=any(turn.exact for turn in kept.turns),
                )
            )
    tally.used += len(writer.records) > before


def _fit(row: TokenRow, origin: str, config: DataConfig, tally: _Tally) -> TokenRow | None:
    """The row within `max_length` by the stated policy, or None, counted."""
    long = len(row.input_ids) > config.max_length
    if long and config.overlong == "drop":
        tally.dropped.add("overlong", origin, f"has {len(row.input_ids)} tokens")
        return None
    kept = clip(row, config.max_length)
    if kept.supervised < config.min_supervised_tokens:
        tally.dropped.add("overlong_prompt" if long else "too_few_supervised_tokens", origin)
        return None
    tally.truncated += long
    return kept


def _prompt(conversation: Conversation, turns: Sequence[Turn], config: DataConfig, tally: _Tally) -> Prompt | None:
    """The conversation's first prompt, held back; None, counted, where it cannot be asked."""
    if not turns:
        return None  # counted where its turns were dropped
    first = turns[0]
    if len(first.prompt) >= config.max_length:
        tally.dropped.add("overlong_prompt", conversation.origin)
        return None
    tally.domains[conversation.domain] += 1
    tally.used += 1
    return Prompt(
        id=conversation.id,
        domain=conversation.domain,
        messages=tuple(engine_messages(conversation.messages[: first.message])),
        tools=list(conversation.tools) if conversation.tools else None,
        prompt_token_ids=tuple(first.prompt),
        reference_token_ids=tuple(first.reply),
    )


def _report(
    writer: RowWriter, prompts: Sequence[Prompt], tally: _Tally, conversations: int, groups: Sequence[int]
) -> PreparationReport:
    splits = Counter(record.split for record in writer.records)
    lengths = [b - a for a, b in zip(writer.offsets, writer.offsets[1:], strict=False)]
    return PreparationReport(
        records=tally.records,
        used=tally.used,
        conversations=conversations,
        rows=len(writer.records),
        tokens=len(writer.input_ids),
        supervised_tokens=sum(writer.loss_mask),
        splits={"train": splits["train"], "validation": splits["validation"], "evaluation": len(prompts)},
        domains=dict(sorted(tally.domains.items())),
        dropped=dict(sorted((cause, count) for cause, count in tally.dropped.items() if count)),
        first_dropped={cause: first.where for cause, first in sorted(tally.dropped.first.items())},
        truncated=tally.truncated,
        exact_turns=tally.exact,
        realigned_turns=tally.realigned,
        shared_rows=tally.shared,
        fanned_out=tally.fanned_out,
        near_duplicates=sum(group != i for i, group in enumerate(groups)),
        longest_row=max(lengths, default=0),
    )


def _require_supervision(report: PreparationReport, dropped: Dropped) -> None:
    if report.splits["train"] and report.supervised_tokens:
        return
    raise DataError(
        f"no supervised token is left to train on, of {report.conversations} conversations: "
        f"{dropped.in_words() or 'none dropped'}",
        mend=dropped.mend() or "bring more conversations",
    )
