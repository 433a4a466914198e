"""A ledger counts every attempt, refuses what would not fit, stops what outgrew the budget, and goes on with more."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from speculators_core import spending
from speculators_core.config import Recipe, validate
from speculators_core.errors import BudgetError, ConfigError
from speculators_core.lifecycle.budget import Amount, BudgetConfig
from speculators_core.lifecycle.changes import LifecycleConfig
from speculators_core.lifecycle.plan import Estimate
from speculators_core.run import Run, produce
from speculators_core.spending import Ledger
from tests.unit.speculators_core.algorithms.tiny import write_verifier

HOUR = LifecycleConfig(price_per_hour={"capture": 7200.0, "other": 3600.0})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The ledger's clocks, moved by hand."""
    now = SimpleNamespace(value=0.0, stamp=0)

    def stamp() -> int:
        now.stamp += 1
        return int(now.stamp)

    monkeypatch.setattr(spending, "time", SimpleNamespace(monotonic=lambda: now.value, time_ns=stamp))
    return now


def ledger(home: Path, **budget: Any) -> Ledger:
    return Ledger(home, BudgetConfig.model_validate(budget), HOUR)


def work(found: Ledger, clock: SimpleNamespace, stage: str, seconds: float, expected: Amount, **made: int) -> None:
    with found.attempt(stage, f"key of {stage}", lambda: expected) as finished_with:
        clock.value += seconds
        finished_with(made)


def test_attempts_add_up_and_cost_their_stages_price(tmp_path: Path, clock: SimpleNamespace) -> None:
    found = ledger(tmp_path)
    work(found, clock, "capture", 10, Amount(), tokens=100, num_bytes=1000)
    work(found, clock, "train", 5, Amount(), tokens=80)
    assert ledger(tmp_path).spent() == Amount(seconds=15, tokens=180, num_bytes=1000, cost=25)


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        ({"hours": 0.01}, "hours 0.0111 of 0.01"),
        ({"cost": 50}, "cost 70 of 50"),
        ({"tokens": 150}, "tokens 190 of 150"),
        ({"gigabytes": 1e-7}, "gigabytes 1.5e-06 of 1e-07"),
    ],
)
def test_a_stage_that_would_exceed_what_is_left_does_not_begin(
    budget: dict[str, Any], words: str, tmp_path: Path, clock: SimpleNamespace
) -> None:
    work(ledger(tmp_path), clock, "capture", 30, Amount(), tokens=100, num_bytes=1)
    expected = Amount(seconds=10, tokens=90, num_bytes=1499)
    with pytest.raises(BudgetError, match=f"train would go beyond the budget: {words}"):
        work(ledger(tmp_path, **budget), clock, "train", 99, expected)
    assert ledger(tmp_path).spent().seconds == 30, "nothing was begun"
    work(ledger(tmp_path, **{name: 10 * value + 200 for name, value in budget.items()}), clock, "train", 9, expected)


def test_what_outgrows_the_budget_is_stopped_and_a_higher_one_goes_on(tmp_path: Path, clock: SimpleNamespace) -> None:
    def train(allowed: float, until: int) -> None:
        found = ledger(tmp_path, hours=allowed / 3600, tokens=2000)
        with found.attempt("train", "key", lambda: Amount(seconds=50, tokens=1000)) as finished_with:
            for done in range(until + 1):
                found.check(done, 10)
                clock.value += 10  # twice as slow as expected
            finished_with({"tokens": 1000})

    with pytest.raises(BudgetError, match=r"train stopped at 7 of 10, the budget is used up"):
        train(60, 10)
    (entry,) = ledger(tmp_path).entries()
    assert entry.took == Amount(seconds=70, tokens=700, cost=70)
    with pytest.raises(BudgetError, match="would go beyond"):
        train(60, 10)
    train(120, 3)  # what is left of the work is expected to take nothing more: it is tried
    assert ledger(tmp_path).spent() == Amount(seconds=110, tokens=1000, cost=110), "no token is counted twice"


def test_a_kill_loses_no_more_than_the_last_seconds(tmp_path: Path, clock: SimpleNamespace) -> None:
    found = ledger(tmp_path, hours=1)
    attempt = found.attempt("capture", "key", Amount)
    attempt.__enter__()
    for done in range(10):
        found.check(done, 10)
        clock.value += 2
    assert ledger(tmp_path).spent().seconds == 18, "noted while it works"


def test_parts_beside_each_other_share_a_budget_and_are_earlier_attempts_at_the_whole(
    tmp_path: Path, clock: SimpleNamespace
) -> None:
    first, second = ledger(tmp_path, hours=50 / 3600), ledger(tmp_path, hours=50 / 3600)
    half = Amount(seconds=10, tokens=500)
    with (
        first.attempt("capture", "key-share-0", lambda: half),
        pytest.raises(BudgetError, match=r"hours .* of 0\.0139"),
        second.attempt("capture", "key-share-1", lambda: half),
    ):
        for done in range(10):
            for part in (first, second):
                part.check(done, 10)
            clock.value += 6
    spent = ledger(tmp_path).spent()
    assert 50 < spent.seconds < 75, "each is held against what the others took"
    with ledger(tmp_path).attempt("capture", "key", Amount) as finished_with:
        finished_with({"tokens": 1000})
    assert ledger(tmp_path).spent().tokens == 1000, "no token is counted twice"


def test_the_tenth_part_is_no_earlier_attempt_at_the_first(tmp_path: Path, clock: SimpleNamespace) -> None:
    with ledger(tmp_path).attempt("capture", "key-share-10", Amount):
        clock.value += 40
    limited, wanted = ledger(tmp_path, hours=50 / 3600), Amount(seconds=15)
    with pytest.raises(BudgetError), limited.attempt("capture", "key-share-1", lambda: wanted):
        raise AssertionError("40 s are spent, 15 are wanted, 50 may be")
    with limited.attempt("capture", "key-share-10", lambda: wanted):
        pass


def test_a_stage_asks_what_it_will_take_only_where_there_is_a_budget(tmp_path: Path, clock: SimpleNamespace) -> None:
    def run(**budget: float) -> Run:
        content = {
            "name": "tiny", "deployment": "tiny", "verifier": {"path": str(tmp_path / "verifier")},
            "data": {"sources": ["nowhere.jsonl"]}, "algorithm": {"kind": "eagle3"}, "budget": budget,
        }  # fmt: skip
        return Run(Recipe.model_validate(content), tmp_path / "home")

    def make(run: Run, key: str, seconds: float) -> bool:
        def build(workspace: Path) -> dict[str, Any]:
            clock.value += seconds
            (workspace / "data").write_text(key)
            return {"tokens": 5}

        asked: list[bool] = []

        def expected() -> Estimate:
            asked.append(True)
            return Estimate(tokens=5)

        produce(run, "prepare", "dataset", key, {}, build, expected=expected)
        return bool(asked)

    write_verifier(tmp_path / "verifier")
    assert not make(run(), "a" * 64, 20)
    assert make(run(hours=1), "b" * 64, 20)
    assert not make(run(hours=0.001), "b" * 64, 20), "what is in the store takes nothing, whatever the budget"
    with pytest.raises(BudgetError):
        make(run(hours=0.01), "c" * 64, 20)
    assert run().ledger.spent() == Amount(seconds=40, tokens=10)
    assert run().recipe.digest() == run(hours=1).recipe.digest(), "one parent run, whatever the budget"


def test_a_cost_without_a_price_is_refused() -> None:
    content = {
        "name": "tiny", "deployment": "tiny", "verifier": {"path": "v"}, "data": {"sources": ["x.jsonl"]},
        "algorithm": {"kind": "eagle3"}, "budget": {"cost": 5},
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"budget\.cost needs lifecycle\.price_per_hour"):
        validate(Recipe, content, where="recipe")
