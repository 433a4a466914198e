"""A recipe whose states are streamed: what its draft's key depends on, and that plans know of no capture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from speculators_core import stages
from speculators_core.config import load_recipe
from speculators_core.engine.config import ServerSpec
from speculators_core.engine.remote import RecordStore
from speculators_core.engine.runtime import Runtime
from speculators_core.errors import ConfigError
from speculators_core.run import Run
from speculators_core.stages import memory
from speculators_core.stages.memory import planned, require_memory
from speculators_core.states.config import CaptureConfig
from speculators_core.states.keeper import Station
from speculators_core.states.stores import room_of
from speculators_core.types import ArtifactRef
from tasks.planner import Planner
from tests.integration.planning_world import World, serve_runtime

DATASET = ArtifactRef(kind="dataset", uri="file:///nowhere", digest="d" * 64)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with serve_runtime() as runtime:
        yield World(tmp_path, runtime)


def looking(world: World, *overrides: str) -> Run:
    return Run(load_recipe(world.recipe, overrides), world.home, only_look=True, check=False)


def key(run: Run, dataset: ArtifactRef = DATASET) -> str:
    return stages.training_key(run, dataset, None)[-1]


@pytest.mark.parametrize(
    "travel",
    [
        "hidden_states={mode: hybrid, cache_gib: 2}",
        "hidden_states={mode: online, window_tokens: 9, engines: 3, trainer_cores: [1]}",
        "capture.backend=shm",
        "capture.concurrency=2",
    ],
)
def test_how_states_travel_is_no_part_of_a_drafts_key(world: World, travel: str) -> None:
    assert key(looking(world, "hidden_states.mode=online", travel)) == key(looking(world, "hidden_states.mode=online"))


@pytest.mark.parametrize("content", ["capture.codec=fp8", "capture.dtype=float32", "training.epochs=7"])
def test_what_decides_their_content_is(world: World, content: str) -> None:
    online = "hidden_states.mode=online"
    assert key(looking(world, online, content)) != key(looking(world, online))
    other = DATASET.model_copy(update={"digest": "e" * 64})
    assert key(looking(world, online), other) != key(looking(world, online))


def test_nothing_is_captured_before_and_the_plan_says_so(world: World) -> None:
    run = looking(world, "hidden_states.mode=online")
    found = {stage.name: stage for stage in Planner(run, None).stages("retrain-afresh")}
    assert [*found] == [*stages.ORDER, "register and promote"]
    assert (found["capture"].state, found["capture"].num_bytes) == ("skipped", None)
    assert found["capture"].why == "hidden_states.mode is online: streamed into training"
    assert found["train"].why == "needs what prepare will make"
    assert stages.order_of(run.recipe) == ("preflight", "prepare", "train", "export", "evaluate")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("hidden_states.mode=hybrid", "mode hybrid needs `cache_gib`"),
        ("hidden_states={mode: online, cache_gib: 1}", "`cache_gib` belongs to mode hybrid"),
        ("hidden_states={engines: []}", "engines"),
        ("hidden_states={engines: [{runtime: {url: 'http://x'}, cores: [1]}]}", "`cores` is for engines that"),
        ("hidden_states={mode: onlin}", "mode"),
    ],
)
def test_settings_that_contradict_each_other_are_named(world: World, wrong: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        looking(world, wrong)


def test_engines_and_trainer_that_do_not_fit_are_refused_with_the_sum(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = looking(world, "hidden_states.mode=online")
    ours = Station(Runtime(python="python"), RecordStore(config={}), ServerSpec(model="verifier", kv_cache_gib=3))
    theirs = Station(run.recipe.runtime, RecordStore(config={}), ServerSpec(model="verifier", kv_cache_gib=99))
    parts = planned(run, [ours, theirs])
    assert parts["engine 0: cache (capture.kv_cache_gib)"] == 3 * 2**30
    assert not any(name.startswith("engine 1") for name in parts), "somebody else's engine is theirs to count"
    monkeypatch.setattr(memory, "free_memory", lambda device: sum(parts.values()) - 1)
    with pytest.raises(ConfigError, match=r"(?s)about 5\.\d\d GiB.*3\.00 GiB  engine 0: cache.*mend: lower capture"):
        require_memory(run, [ours, theirs])
    monkeypatch.setattr(memory, "free_memory", lambda device: sum(parts.values()))
    require_memory(run, [ours, theirs])
    with pytest.raises(ConfigError, match=r"1\.00 GiB  store of records"):
        require_memory(run, [ours, theirs], lent=2**30)


def test_a_store_that_the_run_makes_itself_takes_memory_too() -> None:
    of_ours, of_theirs = CaptureConfig(backend="mooncake"), CaptureConfig(backend="shm", backend_config={"space": "x"})
    assert room_of(of_ours, 1000, 10_000, engines=2) == 4 * of_ours.concurrency * 1000 * 10_000
    assert room_of(of_theirs, 1000, 10_000) == room_of(CaptureConfig(backend="file"), 1000, 10_000) == 0
