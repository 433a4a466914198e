"""A draft's acceptance by the reference loop, in the form of a measured run: it stands in where no engine serves it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from speculators_core.errors import EvaluationError
from speculators_core.evaluation.drafts import ServedDraft
from speculators_core.evaluation.lossless import repeated_share
from speculators_core.evaluation.records import EvaluationPrompt, Measurement, write_measurement
from speculators_core.evaluation.reference.decoding import Drafter, Reply, speculate
from speculators_core.evaluation.reference.verifier import ReferenceVerifier
from speculators_core.evaluation.report import PromptCounts
from speculators_core.evaluation.runs import Conditions
from speculators_core.evaluation.served import draft_digest, drafted_tokens
from speculators_core.verifier.facts import read_facts

log = logging.getLogger(__name__)


def measure_reference(draft_dir: Path, conditions: Conditions, output: Path) -> Measurement:
    """Answer the prompts greedily, one after the other, and write what was counted to `output`, as `measure_draft`.

    Losslessness and speed stay unknown: no engine ran.

    Raises:
        EvaluationError: prompts as in `measure_baseline`, or an algorithm that nothing here drafts for.
        FormatError: it is no draft of ours.
        VerifierError: transformers cannot load the verifier.
    """
    config, chosen = conditions.config, conditions.choose()
    k = config.k or drafted_tokens(draft_dir)
    draft = ServedDraft.open(draft_dir, conditions.verifier_dir)
    facts = read_facts(conditions.verifier_dir)
    layers = (*draft.algorithm.aux_layers(draft.config, facts.num_hidden_layers), facts.num_hidden_layers)
    started = time.monotonic()
    drafter = Drafter(draft)
    verifier = ReferenceVerifier(
        conditions.verifier_dir, layers, config.dtype, trust_remote_code=conditions.trust_remote_code
    )
    loaded = time.monotonic()
    replies = []
    for prompt in chosen:
        ids = tuple(prompt.prompt_token_ids)
        replies.append(
            speculate(verifier, drafter, ids, k=k, max_new_tokens=config.max_new_tokens, ends=set(facts.eos_token_id))
        )
        if conditions.progress is not None:
            conditions.progress(len(replies), len(chosen))
    per_prompt = _count(chosen, replies, k, config.loop_ngram)
    drafts = sum(row.drafts for row in per_prompt)
    if not drafts:
        raise EvaluationError("no reply is longer than one token: nothing was drafted", mend="look at the prompts")
    measurement = Measurement(
        identity=conditions.identity(draft_digest(draft_dir), chosen),
        measured_by="reference",
        k=k,
        count=len(chosen),
        max_new_tokens=config.max_new_tokens,
        concurrency=1,
        drafts=drafts,
        draft_tokens=drafts * k,
        accepted=sum(row.accepted for row in per_prompt),
        accepted_per_position=tuple(sum(row.accepted_per_position[i] for row in per_prompt) for i in range(k)),
        tokens=sum(row.tokens for row in per_prompt),
        seconds=time.monotonic() - loaded,
        engine_seconds=loaded - started,
        divergences=None,
        per_prompt=per_prompt,
    )
    write_measurement(output, measurement)
    return measurement


def _count(
    prompts: Sequence[EvaluationPrompt], replies: Sequence[Reply], k: int, loop_ngram: int
) -> tuple[PromptCounts, ...]:
    return tuple(
        PromptCounts(
            id=prompt.id,
            domain=prompt.domain,
            tokens=len(reply.token_ids),
            drafts=len(reply.accepted),
            accepted=sum(reply.accepted),
            accepted_per_position=reply.accepted_per_position(k),
            repeated_share=repeated_share(reply.token_ids, loop_ngram),
        )
        for prompt, reply in zip(prompts, replies, strict=True)
    )
