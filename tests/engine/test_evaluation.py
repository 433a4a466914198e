"""Acceptance measured on the real engine: drafts whose acceptance is known beforehand."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from speculators_core.errors import EngineError, EvaluationError
from speculators_core.evaluation.compare import compare
from speculators_core.evaluation.config import EvaluationConfig, SpeedConfig
from speculators_core.evaluation.measure import measure_baseline, measure_draft
from speculators_core.evaluation.records import Measurement, read_baseline, read_speed
from speculators_core.evaluation.runs import Conditions
from speculators_core.evaluation.speed import measure_speed
from speculators_core.processes import kill_all

pytestmark = pytest.mark.engine

CONVERSATIONS = Path(__file__).resolve().parents[2] / "deployments" / "data" / "conversations.jsonl"
# float32: replies then part so rarely that they can be counted against each other
CONFIG = EvaluationConfig(
    max_prompts=16,
    max_new_tokens=32,
    repeat_prompts=8,
    concurrency=16,
    resamples=500,
    kv_cache_gib=0.5,
    dtype="float32",
)
COMMA = 28
FINGERPRINT = "f" * 64


@dataclass(frozen=True)
class Prompt:
    id: str
    domain: str
    prompt_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class World:
    """What every test here measures on; `measure` runs a draft against the one baseline."""

    conditions: Conditions
    baseline: Path

    def measure(self, draft: Path, output: Path, config: EvaluationConfig = CONFIG) -> Measurement:
        return measure_draft(draft, replace(self.conditions, config=config), output, baseline=self.baseline)


@pytest.fixture(scope="module")
def world(verifier_dir, runtime, engine_home, tmp_path_factory) -> World:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(verifier_dir)
    rows = [json.loads(line) for line in CONVERSATIONS.read_text().splitlines()[:16]]
    prompts = [
        Prompt(
            id=f"prompt-{n}",
            domain=("even", "odd")[n % 2],
            prompt_token_ids=tuple(
                tokenizer.apply_chat_template(row["conversations"][:1], add_generation_prompt=True, return_dict=False)
            ),
        )
        for n, row in enumerate(rows)
    ]
    baseline = tmp_path_factory.mktemp("evaluation") / "baseline"
    conditions = Conditions(verifier_dir, FINGERPRINT, prompts, runtime, CONFIG, engine_home)
    measure_baseline(conditions, baseline)
    return World(conditions, baseline)


@pytest.fixture(scope="module")
def untrained(verifier_dir, tmp_path_factory) -> Path:
    """A random draft of the demo's shape that names its verifier by a hub id which is not here."""
    from speculators_core.drafts import export_untrained
    from speculators_core.formats.card import ModelCard

    return export_untrained(
        {"kind": "eagle3"},
        verifier_dir,
        1024,
        "somebody/SmolLM2-135M-Instruct",
        tmp_path_factory.mktemp("drafts") / "untrained",
        ModelCard(title="untrained"),
    )


@pytest.fixture(scope="module")
def constant(untrained) -> Path:
    """A draft that always proposes a comma: a final norm of zeros makes every logit equal, and the first one wins."""
    import torch
    from safetensors.torch import load_file, save_file

    path = untrained.parent / "constant"
    shutil.copytree(untrained, path)
    tensors = load_file(path / "model.safetensors")
    tensors["norm.weight"] = torch.zeros_like(tensors["norm.weight"])
    kept = torch.arange(COMMA, COMMA + tensors["d2t"].shape[0])
    tensors["d2t"] = kept - torch.arange(len(kept))
    tensors["t2d"] = torch.zeros_like(tensors["t2d"])
    tensors["t2d"][kept] = True
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def test_an_untrained_draft_is_lossless_and_has_an_acceptance_length_of_one(world, untrained, tmp_path):
    measured = world.measure(untrained, tmp_path / "measurement")
    report = compare(world.baseline, tmp_path / "measurement", CONFIG, tmp_path / "report")
    assert report.acceptance.al == pytest.approx(1.0, abs=0.02)
    assert report.acceptance.drafts == sum(row.drafts for row in measured.per_prompt) > 0
    assert report.acceptance.tokens == sum(row.tokens for row in measured.per_prompt)
    assert report.lossless is not None
    assert report.lossless.holds, report.lossless
    assert report.speed is not None
    assert report.speed.with_ > 0
    assert [group.name for group in report.acceptance.by_domain] == ["even", "odd"]


def test_a_draft_of_commas_is_accepted_exactly_where_the_verifier_writes_them(world, constant, tmp_path):
    """The engine's counts against the replies themselves: a known answer for drafts, accepted and positions."""
    config = CONFIG.model_copy(update={"k": 1})
    measured = world.measure(constant, tmp_path / "one", config)
    assert measured.k == 1
    assert measured.accepted == measured.accepted_per_position[0] == sum(row.accepted for row in measured.per_prompt)
    assert measured.drafts == sum(row.drafts for row in measured.per_prompt)
    from speculators_core.evaluation.records import read_replies

    replies = dict(
        zip((p.id for p in world.conditions.prompts), read_replies(world.baseline / "replies.safetensors"), strict=True)
    )
    compared = 0
    for row in measured.per_prompt:
        if not row.identical:
            continue
        expected, drafts = walk(replies[row.id])
        # the last step may draft, and accept, beyond the end of the reply
        assert abs(row.drafts - drafts) <= 1
        assert 0 <= row.accepted - expected <= 1
        compared += 1
    assert compared >= len(world.conditions.prompts) // 2
    assert measured.accepted > 0


def walk(reply: tuple[int, ...]) -> tuple[int, int]:
    """(accepted, drafts) of a draft that proposes one comma a step: the first token comes from the prompt alone."""
    position, accepted, drafts = 1, 0, 0
    while position < len(reply):
        drafts += 1
        if reply[position] == COMMA and position + 1 <= len(reply):
            accepted += 1
            position += 1
        position += 1
    return accepted, drafts


def test_speed_by_alternating_arms_is_timed_as_pairs_at_each_concurrency(world, untrained, tmp_path):
    """Two engines at once, by turns; what a clock says of 16 tokens on a busy machine is not for a test to judge."""
    speed = SpeedConfig(concurrencies=(4, 2), rounds=2, max_prompts=4)
    conditions = replace(world.conditions, config=CONFIG.model_copy(update={"speed": speed, "max_new_tokens": 16}))
    seen = []
    measure_speed(
        untrained, replace(conditions, progress=lambda done, total: seen.append((done, total))), tmp_path / "s"
    )
    measured = read_speed(tmp_path / "s")
    assert [found.concurrency for found in measured.speeds] == [2, 4]
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    for found in measured.speeds:
        assert len(found.rounds) == 2
        assert all(with_ > 0 and without > 0 for with_, without in found.rounds), found.rounds


def test_an_engine_that_dies_in_the_middle_is_a_typed_error_and_leaves_nothing_behind(world, tmp_path):
    home, output = tmp_path / "home", tmp_path / "baseline"
    with pytest.raises(EngineError):
        measure_baseline(
            replace(world.conditions, home=home, progress=lambda done, total: kill_all(home) and None), output
        )
    assert not output.exists()


def test_a_baseline_of_another_world_is_refused_before_an_engine_starts(world, untrained, tmp_path):
    assert read_baseline(world.baseline).count == len(world.conditions.prompts)
    with pytest.raises(EvaluationError, match="concurrency"):
        world.measure(untrained, tmp_path / "m", CONFIG.model_copy(update={"concurrency": 3}))
    assert not (tmp_path / "m").exists()


def test_a_prompt_that_does_not_fit_is_named_before_an_engine_starts(world, tmp_path):
    long = Prompt(id="much-too-long", domain="all", prompt_token_ids=(5,) * 9000)
    with pytest.raises(EvaluationError, match="much-too-long"):
        measure_baseline(replace(world.conditions, prompts=[long]), tmp_path / "b")
    with pytest.raises(EvaluationError, match="no prompt"):
        measure_baseline(replace(world.conditions, prompts=[]), tmp_path / "b")
