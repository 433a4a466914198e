"""Stages against a real store: what is found, why the rest is not, and what it will take."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from speculators_core import stages
from speculators_core.config import load_recipe
from speculators_core.lifecycle.plan import MADE_OF, PlannedStage
from speculators_core.run import NotProduced, Run
from speculators_core.store import input_digest
from speculators_core.types import ArtifactRef
from tasks.adapters.registry_view import ModelView
from tasks.planner import Champion, Planner
from tasks.release import release_lines
from tests.integration.planning_world import World, serve_runtime

DATASET = {"tokens": 1000, "rows": 10, "splits": {"train": 8, "validation": 2}}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with serve_runtime() as runtime:
        yield World(tmp_path, runtime)


def looking(world: World, *overrides: str) -> Run:
    return Run(load_recipe(world.recipe, overrides), world.home, only_look=True, check=False)


def publish(run: Run, stage: str, kind: str, look: Any, meta: dict[str, Any], **key_only: Any) -> Any:
    """What the stage would have published, without doing its work."""
    with pytest.raises(NotProduced) as caught:
        look()
    missing = caught.value.missing
    assert missing is not None and missing.stage == stage
    settings = key_only or missing.settings
    key = input_digest(stage, stages.VERSIONS[kind], {**missing.inputs, **settings})
    workspace = run.store.workspace(kind, key)
    (workspace / "data.json").write_text("{}")
    made = missing.model_copy(update={"seconds": 20.0, "finished": 1.0}).model_dump(mode="json")
    run.store.publish(workspace, kind, key, {**meta, MADE_OF: made})
    return look().ref


def planned(run: Run, champion: Champion | None = None, action: Any = "retrain-afresh") -> dict[str, PlannedStage]:
    return {stage.name: stage for stage in Planner(run, champion).stages(action)}


def test_an_empty_store_has_nothing_and_knows_no_numbers(world: World) -> None:
    found = planned(looking(world))
    assert [*found] == [*stages.ORDER, "register and promote"]
    assert {stage.state for stage in found.values()} == {"run"}
    assert found["prepare"].why == "was never run here" and found["prepare"].seconds is None
    assert found["evaluate"].why == "needs what export will make"


def test_what_is_done_is_found_and_the_rest_is_estimated_from_it(world: World) -> None:
    run = looking(world, "lifecycle.price_per_hour=3600")
    dataset = publish(run, "prepare", "dataset", lambda: stages.prepare(run), DATASET)
    found = planned(run)
    assert found["prepare"].state == "cached"
    assert found["capture"].tokens == 1000 and found["capture"].seconds is None
    assert found["capture"].num_bytes == 1000 * len(run.layer_ids) * 64 * 2

    states = publish(
        run, "capture", "states", lambda: stages.capture(run, dataset), {"tokens": 500, "seconds": 5.0}, source="engine"
    )
    report = {"tokens": 800, "seconds": 80.0, "began_from": None}
    publish(run, "train", "training", lambda: stages.train(run, states), report)
    assert planned(run)["train"].state == "cached"

    longer = planned(looking(world, "training.epochs=3", "lifecycle.price_per_hour=3600"))
    assert longer["capture"].state == "cached"
    assert longer["train"].why == "changed: training.epochs 1 → 3"
    assert longer["train"].tokens == 2400 and longer["train"].seconds == 240.0 and longer["train"].cost == 240.0

    world.train_verifier(2.0)
    retrained = looking(world)
    digests = (run.fingerprint.digest[:12], retrained.fingerprint.digest[:12])
    found = planned(retrained)
    assert found["prepare"].state == "cached", "weights do not change the rows"
    assert found["capture"].why == f"changed: verifier {digests[0]} → {digests[1]}"
    assert found["capture"].seconds == 10.0, "1000 tokens at 100 tokens a second"


def test_the_champion_is_measured_first_where_that_may_be_all(world: World) -> None:
    champion = Champion(version="4", draft="d" * 64)
    found = planned(looking(world), champion, "re-evaluate")
    assert [*found][:2] == ["prepare", "measure version 4"]
    assert {found[name].state for name in ("capture", "train", "register and promote")} == {"if needed"}
    assert [*planned(looking(world), champion, "retrain")][-2:] == ["measure version 4", "register and promote"]
    assert planned(looking(world), champion, "nothing") == {}


def test_numbers_of_other_data_are_known_for_what_they_are(world: World) -> None:
    def borrows(run: Run) -> bool:
        planner = Planner(run, None)
        planner.stages("retrain-afresh")
        return planner.borrows

    assert not borrows(looking(world)), "nothing was prepared, and no number is told"
    run = looking(world)
    publish(run, "prepare", "dataset", lambda: stages.prepare(run), DATASET)
    assert not borrows(looking(world))
    other = looking(world, "data.max_rows=3")
    assert borrows(other) and planned(other)["prepare"].tokens == 1000


def test_status_says_whether_the_evaluated_draft_is_registered_here_and_serves(world: World) -> None:
    run = looking(world)
    draft = ArtifactRef(uri="store/draft/x", digest="d" * 64, kind="draft")
    here = {"draft.digest": draft.digest, "verifier.fingerprint": run.fingerprint.digest}
    here |= {"runtime.key": run.runtime.key}

    def states(aliases: dict[str, str], **tags: dict[str, str]) -> list[str]:
        versions = {name.removeprefix("v"): found for name, found in tags.items()}
        return [
            line.state for line in release_lines(run, ModelView(model="chat", aliases=aliases, tags=versions), draft)
        ]

    assert states({}) == ["to do", "to do"]
    assert states({"champion": "1"}, v1={**here, "runtime.key": "another"}) == ["to do", "to do"]
    assert states({}, v1=here) == ["done", "to do"]
    assert states({"champion": "1"}, v1=here) == ["done", "done"]
    assert states({"champion": "1"}, v1={}, v2={**here, "gate.outcome": "fail-floor"}) == ["done", "refused"]
