"""Which measurements an evaluation is made of, and what makes each of them anew."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from speculators_core import stages
from speculators_core.config import Recipe
from speculators_core.run import Run, StageResult
from speculators_core.stages import measuring
from speculators_core.types import ArtifactRef
from tests.unit.speculators_core.algorithms.tiny import write_verifier

DATASET = ArtifactRef(kind="dataset", uri="file:///nowhere", digest="d" * 64)


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, str]]:
    """stage -> key of everything that `evaluate` asks for under a recipe, without an engine: all of it is found."""
    verifier = write_verifier(tmp_path / "verifier")

    def ask(draft: str = "draft", **sections: Mapping[str, Any]) -> dict[str, str]:
        found: dict[str, str] = {}

        def find(
            run: Run, stage: str, kind: str, key: str, inputs: Mapping[str, str], *_: Any, **__: Any
        ) -> StageResult:
            found[stage] = key
            ref = ArtifactRef(kind=kind, uri=f"file:///{key}", digest=key)
            return StageResult(name=stage, ref=ref, cached=True, seconds=1.0, summary={}, inputs=dict(inputs))

        monkeypatch.setattr(measuring, "produce", find)
        content = {
            "name": "tiny",
            "deployment": "tiny",
            "verifier": {"path": str(verifier)},
            "data": {"sources": ["nowhere.jsonl"]},
            "algorithm": {"kind": "eagle3"},
            **sections,
        }
        run = Run(Recipe.model_validate(content), tmp_path / "home")
        run.__dict__["runtime"] = SimpleNamespace(key="runtime")
        result = stages.evaluate(run, Path("/draft"), draft, DATASET)
        assert result.name == "evaluate" and result.cached and result.seconds == len(found)
        return found

    return ask


def test_speed_is_measured_by_turns_only_where_the_gate_requires_it(keys: Callable[..., dict[str, str]]) -> None:
    required, told = keys(gate={"speed": "require"}), keys(gate={"speed": "report"})
    assert set(required) == {"baseline", "measure", "speed", "evaluate"} and keys() == required
    assert set(told) == {"baseline", "measure", "evaluate"}
    assert {name: told[name] for name in ("baseline", "measure")} == {
        name: required[name] for name in ("baseline", "measure")
    }, "acceptance is not measured again because the criterion changed"
    assert told["evaluate"] != required["evaluate"]


def test_the_reference_loop_measures_acceptance_alone(keys: Callable[..., dict[str, str]]) -> None:
    by_reference = keys(evaluation={"measured_by": "reference"})
    assert set(by_reference) == {"measure", "evaluate"}
    assert by_reference["measure"] != keys()["measure"]
    assert keys(evaluation={"measured_by": "engine"})["measure"] == keys()["measure"]


@pytest.mark.parametrize(
    ("seen", "by"), [({"drafts": 0, "unservable": "no loader"}, "reference"), ({"drafts": 4}, "engine")]
)
def test_auto_asks_what_preflight_has_seen(
    seen: dict[str, Any],
    by: str,
    keys: Callable[..., dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ref = ArtifactRef(kind="preflight", uri="file:///nowhere", digest="p" * 64)
    looked = StageResult(name="preflight", ref=ref, cached=True, seconds=0.0, summary=seen)
    monkeypatch.setattr(measuring, "preflight", lambda run: looked)
    assert ("baseline" in keys(export={"allow_unservable": True})) == (by == "engine")
    assert "baseline" in keys(), "where only what is served gets through, the engine serves it"


@pytest.mark.parametrize(
    ("changed", "anew"),
    [
        ({"gate": {"min_speed_ratio": 1.2}}, set()),
        ({"evaluation": {"speed": {"rounds": 9}}}, {"speed", "evaluate"}),
        ({"evaluation": {"max_prompts": 500}}, {"baseline", "measure", "evaluate"}),
        ({"evaluation": {"k": 5}}, {"measure", "speed", "evaluate"}),
        ({"draft": "another"}, {"measure", "speed", "evaluate"}),
    ],
)
def test_a_change_measures_anew_what_it_changes(
    keys: Callable[..., dict[str, str]], changed: dict[str, Any], anew: set[str]
) -> None:
    before, after = keys(), keys(**changed)
    assert {name for name in before if before[name] != after[name]} == anew
