"""A plan names what moved, and why a stage is not done; its numbers come from what was measured."""

from __future__ import annotations

from typing import Any

import pytest

from speculators_core.lifecycle.changes import LifecycleConfig
from speculators_core.lifecycle.plan import Facts, PlannedStage, Rates, Recorded, moved, total, why_missing
from speculators_core.verifier.fingerprint import PARTS

THEN = Facts(verifier="f", parts=dict.fromkeys(PARTS, "p"), runtime="r", vllm="0.32.0", sources="s", champion="3")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, ()),
        (
            {"verifier": "g", "parts": {**THEN.parts, "weights": "q", "chat_template": "q"}},
            ("the verifier changed (weights, chat_template)",),
        ),
        ({"runtime": "q", "vllm": "0.33.0"}, ("the runtime changed (vLLM 0.32.0 → 0.33.0)",)),
        ({"runtime": "q"}, ("the runtime changed (another build, device or runner)",)),
        ({"sources": "q", "champion": None}, ("the data sources changed", "the champion was version 3 and is none")),
    ],
)
def test_what_moved_is_named(change: dict[str, Any], words: tuple[str, ...]) -> None:
    assert moved(THEN, THEN.model_copy(update=change)) == words


def recorded(kind: str = "training", *, finished: float = 1.0, **facts: Any) -> Recorded:
    return Recorded(
        kind=kind,
        inputs=facts.get("inputs", {"states": "a" * 64, "verifier": "b" * 64}),
        settings=facts.get("settings", {"training": {"epochs": 1, "seed": 0}}),
        seconds=facts.get("seconds"),
        finished=finished,
        meta=facts.get("meta", {}),
    )


def why(earlier: list[Recorded], **changes: Any) -> str:
    inputs = {"states": "a" * 64, "verifier": "b" * 64} | changes.get("inputs", {})
    return why_missing(inputs, changes.get("settings", {"training": {"epochs": 1, "seed": 0}}), earlier)


def test_a_stage_that_is_not_done_says_what_changed() -> None:
    assert why([]) == "was never run here"
    assert why([recorded()], inputs={"verifier": "c" * 64}) == f"changed: verifier {'b' * 12} → {'c' * 12}"
    assert why([recorded()], settings={"training": {"epochs": 2, "seed": 0}}) == "changed: training.epochs 1 → 2"
    assert why([recorded()]) == "the stage's own code changed, or its artifact is damaged"
    assert "do not say" in why([recorded(inputs=None)])


def test_the_nearest_earlier_artifact_is_compared() -> None:
    far = recorded(inputs={"states": "x", "verifier": "y"}, finished=9)
    assert why([far, recorded()], inputs={"states": "d" * 64}) == f"changed: states {'a' * 12} → {'d' * 12}"


def test_a_digest_of_things_that_are_named_is_not_named_itself() -> None:
    before = {"capture": "1", "verifier": "b"}
    found = why_missing({"capture": "2", "verifier": "c"}, {}, [recorded(inputs=before, settings={})])
    assert found == "changed: verifier b → c"


def test_times_come_from_the_newest_run() -> None:
    old = recorded("states", meta={"tokens": 100, "seconds": 100.0})
    new = recorded("states", finished=2, meta={"tokens": 1000, "seconds": 10.0})
    whole = recorded("preflight", seconds=90.0, meta={"seconds": 80.0})
    rates = Rates([new, old, whole])
    assert rates.of_tokens("states", 5000) == 50.0
    assert rates.of_tokens("training", 5000) is None and rates.of_tokens("states", None) is None
    assert rates.whole("preflight") == 90.0 and rates.whole("draft") is None


def test_a_price_comes_from_the_table() -> None:
    flat = LifecycleConfig(price_per_hour=3.6)
    assert flat.price("capture", 1000) == 1.0 and flat.price("capture", None) is None
    table = LifecycleConfig(price_per_hour={"capture": 36.0, "evaluate": 72.0, "other": 3.6})
    assert [table.price(stage, 100) for stage in ("capture", "train", "measure")] == [1.0, 0.1, 2.0]
    assert LifecycleConfig().price("train", 100) is None


def test_a_sum_is_of_what_is_known() -> None:
    stages = [PlannedStage(name=str(n), state="run", why="", seconds=n) for n in (1.0, None, 2.0)]
    assert total(stages, "seconds") == 3.0 and total(stages, "cost") is None
