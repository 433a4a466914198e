from __future__ import annotations

import pytest

from speculators_core.config import Recipe, load_recipe
from speculators_core.errors import ConfigError
from speculators_core.run import StageResult
from speculators_core.stages import require_prompts
from speculators_core.types import ArtifactRef
from tests.environment import ROOT


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
