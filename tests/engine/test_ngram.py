"""vLLM's n-gram look-up as a baseline: counted as a draft is, and as lossless."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from speculators_core.engine.runtime import Runtime
from speculators_core.evaluation.config import EvaluationConfig
from speculators_core.evaluation.measure import NGRAM, measure_ngram
from speculators_core.evaluation.records import read_measurement
from speculators_core.evaluation.runs import Conditions

pytestmark = [pytest.mark.engine, pytest.mark.trial]


@dataclass(frozen=True)
class Prompt:
    id: str
    domain: str
    prompt_token_ids: tuple[int, ...]


def test_look_up_is_counted_on_the_real_engine(
    verifier_dir: Path, runtime: Runtime, engine_home: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(verifier_dir)
    questions = ["Repeat ten times: the cat sat on the mat.", "Count from one to thirty.", "Say hello."]
    prompts = [
        Prompt(
            id=f"p{n}",
            domain="all",
            prompt_token_ids=tuple(
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
                )
            ),
        )
        for n, text in enumerate(questions)
    ]
    conditions = Conditions(
        verifier_dir=verifier_dir,
        verifier_fingerprint="f" * 64,
        prompts=prompts,
        runtime=runtime,
        config=EvaluationConfig(max_new_tokens=96, concurrency=4, kv_cache_gib=0.5),
        home=engine_home,
    )
    found = measure_ngram(conditions, tmp_path)
    assert found.identity.draft == NGRAM
    assert found.drafts > 0 and found.accepted > 0, "a text that repeats itself is looked up"
    assert 1.0 < found.tokens_per_step <= 1 + found.k
    assert sum(row.drafts for row in found.per_prompt) == found.drafts
    assert read_measurement(tmp_path) == found
    assert json.loads((tmp_path / "measurement.json").read_text())["identity"]["draft"] == NGRAM
