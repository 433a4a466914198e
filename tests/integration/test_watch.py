"""`watch` on a real Prefect server and a real registry: a change is seen once, and a newer one supersedes it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.environment import ROOT, child_environment

CHILDREN = Path(__file__).with_name("watch_children.py")
Steps = list[dict[str, Any]]


def run(name: str, root: Path, **variables: str) -> Steps:
    root.mkdir()
    environ = child_environment(root / "home") | {"NO_PROXY": "*", "no_proxy": "*"} | variables
    done = subprocess.run(
        [sys.executable, str(CHILDREN), name, str(root)],
        cwd=ROOT, env=environ, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    return [json.loads(line.removeprefix("STEP ")) for line in done.stdout.splitlines() if line.startswith("STEP ")]


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Steps:
    pages_of_two = {"PREFECT_SERVER_API_DEFAULT_LIMIT": "2"}
    return run("story", tmp_path_factory.mktemp("watch") / "world", **pages_of_two)


def step(steps: Steps, name: str) -> dict[str, Any]:
    return next(found for found in steps if found["step"] == name)


def test_deploying_again_changes_nothing_and_differences_are_named(steps: Steps) -> None:
    assert step(steps, "deploy")["changes"] == ["create"] * 7
    assert step(steps, "deploy again")["changes"] == ["same"] * 7
    fields = step(steps, "deploy another")["fields"]
    assert set(fields) == {"watch/draftsmith", "draftsmith: runs that stopped beating"}
    assert fields["draftsmith: runs that stopped beating"] == ["trigger.within: 900.0 → 1800.0"]


def test_nothing_changed_is_nothing_done_and_soon_over(steps: Steps) -> None:
    found = step(steps, "in step")
    assert (found["action"], found["run"], found["states"]) == ("nothing", None, {})
    assert step(steps, "ten")["processor"] < 5, "ten verifiers with warm hashes"


def test_a_change_starts_one_run_for_it(steps: Steps) -> None:
    first, again = step(steps, "weights changed"), step(steps, "looked again")
    assert (first["action"], first["changes"], first["outcome"]) == ("retrain", ["weights"], "started")
    assert first["parameters"]["request"]["action"] == "retrain"
    assert (again["outcome"], again["run"]) == ("exists", first["run"]) and len(again["states"]) == 1


def test_a_newer_change_supersedes_the_run_for_the_older(steps: Steps) -> None:
    first, second = step(steps, "weights changed"), step(steps, "template too")
    assert second["superseded"] == [first["run"]] and second["outcome"] == "started"
    assert second["states"][first["run"]] == "Cancelled" and second["states"][second["run"]] == "Scheduled"


def test_a_run_that_failed_is_tried_again_but_not_for_ever(steps: Steps) -> None:
    found = [item for item in steps if item["step"] == "it failed"]
    assert [item["outcome"] for item in found] == ["started", "started", "given up"]


def test_another_engine_is_a_change_and_one_taken_back_ends_its_run(steps: Steps) -> None:
    engine, back = step(steps, "another engine"), step(steps, "taken back")
    assert (engine["action"], engine["changes"]) == ("re-evaluate", ["runtime"])
    assert (back["action"], back["superseded"]) == ("nothing", [engine["run"]])
    assert back["states"][engine["run"]] == "Cancelled"
    before, asked = (found["parameters"]["request"] for found in (step(steps, "weights changed"), engine))
    assert before["expected_runtime"] and before["expected_runtime"] != asked["expected_runtime"]


def test_a_change_that_comes_again_is_answered_again(steps: Steps) -> None:
    for first, again in (("another engine", "another engine again"), ("weights changed", "the weights again")):
        before, after = step(steps, first), step(steps, again)
        assert (after["action"], after["outcome"]) == (before["action"], "started")
        assert after["run"] != before["run"]
        assert (after["states"][before["run"]], after["states"][after["run"]]) == ("Cancelled", "Scheduled")
    for part in ("expected", "expected_runtime"):
        outcomes = step(steps, f"{part} is gone")["outcomes"]
        assert outcomes == ["started", "started", "exists"], "such a run had done nothing"


def test_what_cannot_be_looked_at_fails_the_watch_after_the_others_were_seen_to(steps: Steps) -> None:
    found = step(steps, "one is broken")
    assert found["state"] == "Failed" and "1 of 2 recipes" in found["message"] and "gone" in found["message"]
    assert found["last"] == "Scheduled"


def test_a_backfill_starts_every_pair_and_ends_with_its_parent(steps: Steps) -> None:
    found = step(steps, "backfill")
    assert (found["started"], found["runs"], found["states"]) == (4, 4, ["Cancelled"])
    kinds = [("peagle" in item, "name=chat-" in item) for item in found["further"]]
    assert kinds.count((True, True)) == 2 and kinds.count((False, True)) == 2


def test_each_change_is_one_typed_event(steps: Steps) -> None:
    found = step(steps, "events")
    assert found["names"].count("engine.changed") == 2 and found["names"].count("verifier.changed") >= 3
    first = found["payloads"][0]
    assert first["deployment"] == "chat" and first["version"] == "1" and first["changes"] == ["weights"]


@pytest.mark.trial  # a worker and a run of its own: half a minute of imports
def test_a_worker_runs_the_deployed_flow(tmp_path: Path) -> None:
    (found,) = run("served", tmp_path / "world")
    assert found["worker"] == 0, found["errors"]
    assert found["state"] == "Completed", found["errors"]


@pytest.mark.trial  # Prefect's whole server, a worker, and half a minute without a heartbeat
def test_a_published_verifier_is_looked_at_at_once_and_a_run_that_died_is_marked(tmp_path: Path) -> None:
    steps = run("automated", tmp_path / "world")
    published = step(steps, "published")
    assert published["looked"] == "Completed", published["errors"]
    [key] = published["keys"]
    assert key.startswith("chat:retrain:") and published["states"] == ["Scheduled"]
    assert step(steps, "events")["names"] == ["verifier.changed"]
    assert step(steps, "died")["crashed"]


def test_a_champion_is_kept_where_it_holds_and_only_there(tmp_path: Path) -> None:
    held, fell = run("kept", tmp_path / "world")
    assert (held["state"], held["kept"]) == ("Completed", True)
    assert held["action"] == "nothing" and "has passed the champion" in held["reasons"][-1]
    assert fell["state"] == "Failed" and fell["kept"] is None, "it went on to train, and this runtime has no engine"
    assert fell["action"] == "retrain" and "acceptance length fell from 1.600" in fell["reasons"][-1]


def test_a_fall_of_served_acceptance_is_answered_and_told_once(tmp_path: Path) -> None:
    steps = run("drifted", tmp_path / "world", DRAFTSMITH_SITE=str(tmp_path / "site.yaml"))
    assert step(steps, "as registered")["state"] == "steady" and step(steps, "as registered")["action"] == "nothing"
    fallen, still, over = (step(steps, name) for name in ("fallen", "still fallen", "recovered"))
    assert (fallen["state"], fallen["action"], fallen["changes"]) == ("drifted", "re-evaluate", ["traffic"])
    assert still["outcome"] == "exists", "one run for one incident"
    assert fallen["messages"] == still["messages"] == over["messages"] == ["chat: traffic.drifted (version 1)"]
    assert "against 1.600 registered" in fallen["said"][0]
    assert (over["state"], over["action"], over["superseded"]) == ("steady", "nothing", 1)
    away = step(steps, "away")
    assert away["state"] == "Failed" and "the counters of chat cannot be read" in away["message"]


def test_what_stages_took_stays_with_their_runs(tmp_path: Path) -> None:
    steps = run("costs", tmp_path / "world", DRAFTSMITH_SITE=str(tmp_path / "site.yaml"))
    assert step(steps, "refused")["why"] == "otherone would go beyond the budget: tokens 2,000 of 1,500"
    found = step(steps, "kept")
    status, first = found["children"]["firstone"]
    assert (
        status == "FINISHED"
        and first["cost.tokens"] == 1000
        and first["cost.price"] == pytest.approx(10 * first["cost.seconds"], abs=1e-3)
    )
    status, other = found["children"]["otherone"]
    assert status == "FAILED" and other["cost.tokens"] == 0
    assert found["parent"]["cost.tokens"] == 1000 and found["messages"] == ["chat: budget.exceeded"]
