"""From counts to report: fields, groups, and which runs belong together."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from speculators_core.engine.client import Generation
from speculators_core.engine.metrics import SpecDecodeCounters
from speculators_core.errors import EvaluationError
from speculators_core.evaluation.compare import compare
from speculators_core.evaluation.config import EvaluationConfig, SpeedConfig
from speculators_core.evaluation.measure import _prompt_counts, _require_same_counts
from speculators_core.evaluation.plots import PLOTS
from speculators_core.evaluation.records import (
    Baseline,
    Measurement,
    SpeedMeasurement,
    prompts_digest,
    read_measurement,
    read_replies,
    write_measurement,
    write_replies,
)
from speculators_core.evaluation.report import Divergence, Identity, PromptCounts, read_report, write_jsonl
from speculators_core.evaluation.speed import speed_of_rounds
from tests.unit.speculators_core.evaluation.planted import planted_counts, prompt_rates

CONFIG = EvaluationConfig(resamples=200)
IDENTITY = Identity(draft="d", verifier_fingerprint="f", runtime_key="r", vllm="0.32.0", prompts="p")


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """Directories as measure_baseline and measure_draft leave them, for 120 planted prompts."""
    generator = np.random.default_rng(0)
    drafts, accepted = planted_counts(prompt_rates(120, 0.5, generator), generator)
    rows = tuple(
        PromptCounts(
            id=f"prompt-{n}",
            domain="code" if n < 40 else "chat",
            tokens=128,
            drafts=int(drafts[n]),
            accepted=int(accepted[n].sum()),
            accepted_per_position=tuple(int(x) for x in accepted[n]),
            repeated_share=0.9 if n % 10 == 0 else 0.0,
            identical=n != 5,
        )
        for n in range(120)
    )
    divergence = Divergence(id="prompt-5", position=17, gap=0.125, top2_gap=0.125)
    measured = Measurement(
        identity=IDENTITY,
        k=3,
        count=120,
        max_new_tokens=128,
        concurrency=32,
        drafts=int(drafts.sum()),
        draft_tokens=int(3 * drafts.sum()),
        accepted=int(accepted.sum()),
        accepted_per_position=tuple(int(x) for x in accepted.sum(0)),
        tokens=120 * 128,
        seconds=64.0,
        engine_seconds=30.0,
        divergences=(divergence,),
    )
    alone = Baseline(
        verifier_fingerprint="f",
        runtime_key="r",
        vllm="0.32.0",
        prompts="p",
        count=120,
        max_new_tokens=128,
        concurrency=32,
        tokens=120 * 128,
        seconds=32.0,
        engine_seconds=30.0,
        repeated=32,
        divergences=(divergence,),
    )
    (tmp_path / "baseline").mkdir()
    (tmp_path / "measurement").mkdir()
    (tmp_path / "baseline" / "baseline.json").write_text(alone.model_dump_json())
    (tmp_path / "measurement" / "measurement.json").write_text(measured.model_dump_json())
    write_jsonl(tmp_path / "measurement" / "per_prompt.jsonl", rows)
    return tmp_path / "baseline", tmp_path / "measurement"


def test_report_json_has_the_fields_that_scripts_read(runs, tmp_path):
    report = compare(*runs, CONFIG, tmp_path / "report")
    content = json.loads((tmp_path / "report" / "report.json").read_text())
    acceptance = content["acceptance"]
    assert acceptance["k"] == 3
    assert acceptance["al"] == pytest.approx(1 + acceptance["accepted"] / acceptance["drafts"])
    assert acceptance["al"] == pytest.approx(1 + sum(acceptance["per_position"]))
    assert acceptance["interval"]["low"] < acceptance["al"] < acceptance["interval"]["high"]
    assert (acceptance["prompts"], acceptance["tokens"]) == (120, 120 * 128)
    assert acceptance["by_k"][-1] == pytest.approx(acceptance["al"])
    assert content["lossless"]["prompts"] == 120
    assert content["lossless"]["identical"] == 119
    assert (content["lossless"]["baseline_prompts"], content["lossless"]["baseline_identical"]) == (32, 31)
    assert content["speed"]["with"] == 240.0
    assert content["speed"]["without"] == 480.0
    assert content["speed"]["concurrency"] == 32
    assert "per_prompt" not in content
    assert read_report(tmp_path / "report") == report


def test_groups_add_up_and_loops_are_left_out_once_more(runs, tmp_path):
    acceptance = compare(*runs, CONFIG, tmp_path / "report").acceptance
    assert [(group.name, group.prompts) for group in acceptance.by_domain] == [("chat", 80), ("code", 40)]
    assert sum(group.drafts for group in acceptance.by_domain) == acceptance.drafts
    assert acceptance.loops == 12
    assert acceptance.without_loops.prompts == 108


def test_report_holds_no_conversation_and_every_file_that_is_promised(runs, tmp_path):
    compare(*runs, CONFIG, tmp_path / "report")
    names = {path.name for path in (tmp_path / "report").iterdir()}
    assert names == {"report.json", "report.md", "per_prompt.jsonl", *PLOTS}
    for name in PLOTS:
        assert (tmp_path / "report" / name).read_bytes().startswith(b"\x89PNG")
    keys = set(json.loads((tmp_path / "report" / "per_prompt.jsonl").read_text().splitlines()[0]))
    assert keys == set(PromptCounts.model_fields)
    assert "119 of 120 replies are identical" in (tmp_path / "report" / "report.md").read_text()


def test_the_report_says_what_counted(runs, tmp_path):
    directory = runs[1]
    measured = read_measurement(directory)
    assert compare(None, directory, CONFIG, tmp_path / "served").measured_by == "engine"
    write_measurement(directory, measured.model_copy(update={"measured_by": "reference"}))
    assert compare(None, directory, CONFIG, tmp_path / "report").measured_by == "reference"
    assert json.loads((tmp_path / "report" / "report.json").read_text())["measured_by"] == "reference"
    assert "the reference loop, not served" in (tmp_path / "report" / "report.md").read_text()


def test_without_a_baseline_losslessness_and_speed_stay_unknown(runs, tmp_path):
    report = compare(None, runs[1], CONFIG, tmp_path / "report")
    assert report.lossless is None
    assert report.speed is None


def test_speed_by_alternating_arms_stands_beside_the_cheap_figure(runs, tmp_path):
    speeds = (speed_of_rounds([(300.0, 200.0), (30.0, 20.0), (60.0, 50.0)], 8),)
    measured = SpeedMeasurement(identity=IDENTITY.model_copy(update={"prompts": "fewer"}), speeds=speeds)
    (tmp_path / "speed").mkdir()
    (tmp_path / "speed" / "speed.json").write_text(measured.model_dump_json())
    report = compare(*runs, CONFIG, tmp_path / "report", speed=tmp_path / "speed")
    assert report.speed is not None and report.speed.ratio == 0.5
    assert report.told_speed == report.alternating[0]
    assert (report.told_speed.ratio, report.told_speed.with_, report.told_speed.without) == (1.5, 60.0, 50.0)
    assert read_report(tmp_path / "report") == report
    text = (tmp_path / "report" / "report.md").read_text()
    assert "median of 3 alternating rounds" in text and "one run each" not in text

    other = measured.model_copy(update={"identity": IDENTITY.model_copy(update={"draft": "another"})})
    (tmp_path / "speed" / "speed.json").write_text(other.model_dump_json())
    with pytest.raises(EvaluationError, match="differ in draft"):
        compare(*runs, CONFIG, tmp_path / "report", speed=tmp_path / "speed")


@pytest.mark.parametrize("field", ["verifier_fingerprint", "runtime_key", "prompts", "max_new_tokens", "concurrency"])
def test_runs_of_different_worlds_do_not_compare(runs, tmp_path, field):
    path = runs[0] / "baseline.json"
    content = json.loads(path.read_text())
    content[field] = 7 if isinstance(content[field], int) else "another"
    path.write_text(json.dumps(content))
    with pytest.raises(EvaluationError, match="differ in"):
        compare(*runs, CONFIG, tmp_path / "report")


def test_torn_directories_are_named(runs, tmp_path):
    (runs[1] / "per_prompt.jsonl").write_text('{"id": "x"')
    with pytest.raises(EvaluationError, match="no measurement"):
        read_measurement(runs[1])
    with pytest.raises(EvaluationError, match="no readable"):
        read_report(tmp_path)


def test_replies_come_back_and_torn_ones_do_not(tmp_path):
    replies = [(1, 2, 3), (), (49151,)]
    write_replies(tmp_path / "replies.safetensors", replies)
    assert read_replies(tmp_path / "replies.safetensors") == replies
    (tmp_path / "replies.safetensors").write_bytes(b"torn")
    with pytest.raises(EvaluationError, match="no replies"):
        read_replies(tmp_path / "replies.safetensors")


class Prompt:
    def __init__(self, name: str, tokens: tuple[int, ...] = (1, 2)) -> None:
        self.id, self.domain, self.prompt_token_ids = name, "all", tokens


def test_prompt_counts_from_the_histogram_that_vllm_returns():
    reply = Generation(
        id="a",
        prompt_token_ids=(1, 2),
        token_ids=tuple(range(20)),
        text="",
        finish_reason="stop",
        spec_metrics={"acceptance_histogram": [4, 3, 2, 1], "num_spec_steps": 10, "num_accepted_draft_tokens": 10},
    )
    counts = _prompt_counts(Prompt("a"), reply, 3, True, CONFIG)
    assert (counts.drafts, counts.accepted, counts.accepted_per_position) == (10, 10, (6, 3, 1))
    one = reply.model_copy(update={"token_ids": (2,), "spec_metrics": None})
    assert _prompt_counts(Prompt("a"), one, 3, True, CONFIG).drafts == 0
    with pytest.raises(EvaluationError, match="did not say"):
        _prompt_counts(Prompt("a"), reply.model_copy(update={"spec_metrics": None}), 3, True, CONFIG)


def test_counters_that_are_not_this_runs_alone_are_refused():
    rows = [
        PromptCounts(
            id="a", domain="all", tokens=9, drafts=5, accepted=3, accepted_per_position=(2, 1, 0), repeated_share=0.0
        )
    ]
    _require_same_counts(SpecDecodeCounters(5, 15, 3, (2, 1, 0)), rows)
    with pytest.raises(EvaluationError, match="somebody else"):
        _require_same_counts(SpecDecodeCounters(6, 18, 3, (2, 1, 0)), rows)
    with pytest.raises(EvaluationError, match="drafted nothing"):
        _require_same_counts(SpecDecodeCounters(), rows)


def test_prompts_digest_depends_on_tokens_and_order():
    a, b = Prompt("a"), Prompt("b")
    assert prompts_digest([a, b]) == prompts_digest([Prompt("a"), Prompt("b")])
    assert prompts_digest([a, b]) != prompts_digest([b, a])
    assert prompts_digest([a]) != prompts_digest([Prompt("a", (1, 3))])


def test_settings_of_speed_change_the_key_of_speed_alone():
    base, other = EvaluationConfig(), EvaluationConfig(speed=SpeedConfig(rounds=9))
    for speculation in (False, True):
        assert base.run_inputs(speculation=speculation) == other.run_inputs(speculation=speculation)
    assert base.speed_inputs() != other.speed_inputs()
    assert base.speed_inputs() == EvaluationConfig(max_prompts=500, resamples=100).speed_inputs()
    assert base.speed_inputs() == EvaluationConfig(speed=SpeedConfig(concurrencies=(64, 64))).speed_inputs()
    assert base.speed_inputs() != EvaluationConfig(concurrency=8).speed_inputs()


def test_a_baselines_key_survives_settings_that_do_not_change_its_run():
    base = EvaluationConfig()
    assert base.run_inputs(speculation=False) == EvaluationConfig(k=5, resamples=100, tie_gap=0.1).run_inputs(
        speculation=False
    )
    assert base.run_inputs(speculation=True) != EvaluationConfig(k=5).run_inputs(speculation=True)
    assert base.run_inputs(speculation=False) != EvaluationConfig(concurrency=8).run_inputs(speculation=False)
    assert base.run_inputs(speculation=True) == EvaluationConfig(repeat_prompts=8).run_inputs(speculation=True)
