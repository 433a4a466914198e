from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from speculators_core.config import Recipe, load_recipe
from speculators_core.errors import ConfigError
from speculators_core.run import NotProduced, Run, StageResult
from speculators_core.stages import VERSIONS, prepare, require_likely_prompts, require_prompts
from speculators_core.store import input_digest
from speculators_core.types import ArtifactRef
from tests.environment import ROOT
from tests.unit.speculators_core.algorithms.tiny import write_verifier


def recipe(*overrides: str) -> Recipe:
    return load_recipe(ROOT / "deployments" / "recipes" / "demo.yaml", list(overrides))


def dataset(prompts: int) -> StageResult:
    ref = ArtifactRef(kind="dataset", uri="x", digest="0" * 64)
    summary = {"splits": {"train": 900, "validation": 40, "evaluation": prompts}}
    return StageResult(name="prepare", ref=ref, cached=False, seconds=0.0, summary=summary)


def test_a_gate_that_nothing_can_pass_is_refused_before_the_expensive_part() -> None:
    assert require_prompts(recipe(), dataset(128)) == dataset(128)
    with pytest.raises(ConfigError, match=r"10 prompts are held back.*gate.min_prompts asks for 100") as told:
        require_prompts(recipe(), dataset(10))
    assert "data.evaluation_prompts" in str(told.value)
    assert require_prompts(recipe("gate.min_prompts=8"), dataset(10)).ref == dataset(10).ref


def test_a_gate_that_asks_for_more_than_is_evaluated_is_refused_with_the_recipe() -> None:
    told = "evaluation.max_prompts is 8, but gate.min_prompts asks for 100.*raise the one or lower the other"
    with pytest.raises(ConfigError, match=told):
        recipe("evaluation.max_prompts=8")
    assert recipe("evaluation.max_prompts=8", "gate.min_prompts=8").evaluation.max_prompts == 8


def test_too_few_conversations_are_told_before_anything_is_prepared(tmp_path: Path) -> None:
    verifier, source = write_verifier(tmp_path / "verifier"), tmp_path / "few.jsonl"

    def ask(number: int, *overrides: str) -> None:
        turns = [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "so"}]
        source.write_text("".join(json.dumps({"conversations": turns}) + "\n" for _ in range(number)))
        named = [f"verifier.path={verifier}", f"data.sources=[{source}]", "gate.min_prompts=10", *overrides]
        require_likely_prompts(Run(recipe(*named), tmp_path / "home"))

    ask(40)
    for number, overrides in (
        (39, ()),
        (80, ("data.evaluation_prompts=9",)),
        (80, ("data.max_rows=39",)),
    ):
        with pytest.raises(ConfigError, match=r"at most 9 prompts can be held back.*gate\.min_prompts asks for 10"):
            ask(number, *overrides)
    assert not (tmp_path / "home" / "store" / "dataset").exists()


def test_what_is_prepared_is_counted_itself(tmp_path: Path) -> None:
    loaded = recipe(f"verifier.path={write_verifier(tmp_path / 'verifier')}", "data.max_rows=400")
    run = Run(loaded, tmp_path / "home")
    require_likely_prompts(run)  # by the number of conversations
    with pytest.raises(NotProduced) as missing:
        prepare(replace(run, only_look=True))
    made_of = missing.value.missing
    assert made_of is not None
    key = input_digest("prepare", VERSIONS["dataset"], {**made_of.inputs, **made_of.settings})
    workspace = run.store.workspace("dataset", key)
    (workspace / "rows").write_text("stand-in")
    run.store.publish(workspace, "dataset", key, {"splits": {"evaluation": 99}}, producer={})
    with pytest.raises(ConfigError, match="99 prompts are held back"):
        require_likely_prompts(run)
