"""`plan`, `apply`, `why` and `diff` on a real registry: what changed is named, and a plan is good for one world."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from speculators_core import stages
from speculators_core.config import load_recipe
from speculators_core.errors import RegistryError
from speculators_core.lifecycle.promotion import settle
from speculators_core.run import Run
from speculators_core.store import Store
from tasks.adapters.aliases import MlflowAliases
from tasks.adapters.registry_view import look
from tasks.adapters.tracking import Tracking
from tasks.planning import serving_version
from tests.integration.planning_world import MODEL, TEMPLATE, World, serve_runtime
from tests.integration.test_registry_protocol import Server


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with serve_runtime() as runtime:
        yield World(tmp_path, runtime)


def test_a_story_of_changes(world: World) -> None:
    recipe = str(world.recipe)
    first = world.ask("plan", recipe)
    assert first["action"] == "retrain-afresh" and first["facts"]["champion"] is None
    whys = {stage["name"]: stage["why"] for stage in first["stages"]}
    assert whys["prepare"] == "was never run here" and whys["capture"] == "needs what prepare will make"
    assert list(whys)[-1] == "register and promote"

    world.register()
    assert world.say("why", recipe) == "chat version 1 is in step with its verifier and runtime\n"
    assert world.ask("plan", recipe)["action"] == "nothing"
    assert world.say("apply", str(world.home / "plans" / "chat.json")) == "nothing to do\n"

    (world.verifier / "chat_template.jinja").write_text(TEMPLATE.replace("m.content", "m.content | trim"))
    told = world.say("why", recipe)
    assert told.startswith("chat version 1 is stale:\n") and "+{{ m.content | trim }}" in told
    planned = world.ask("plan", recipe, "--out", str(world.root / "plan.json"))
    assert (planned["action"], planned["changes"]) == ("re-evaluate", ["chat_template"])
    assert [stage["name"] for stage in planned["stages"]][:2] == ["prepare", "measure version 1"]
    assert planned["stages"][-1]["state"] == "if needed" and planned["warm_start"] == "1"
    assert planned == json.loads((world.root / "plan.json").read_text())

    world.train_verifier(2.0)
    world.data.write_text(world.data.read_text() + "\n")
    refused = world.run("apply", str(world.root / "plan.json"))
    assert refused.returncode == 1
    assert "the verifier changed (weights); the data sources changed" in refused.stderr

    overridden = ("--set", "lifecycle.on_change.weights=nothing", "--set", "lifecycle.on_change.chat_template=nothing")
    assert world.ask("plan", recipe, *overridden)["action"] == "nothing"
    again = world.ask("plan", recipe, "--out", str(world.root / "plan.json"))
    assert again["action"] == "retrain" and again["changes"] == ["weights", "chat_template"]
    world.register()
    refused = world.run("apply", str(world.root / "plan.json"))
    assert refused.returncode == 1 and "the champion was version 1 and is 2" in refused.stderr
    (reason,) = world.ask("why", MODEL, "--runtime", load_recipe(world.recipe).runtime.url or "")["reasons"]
    assert "device cpu → unknown" in reason, "without its store the server does not say what it is"


def test_what_is_not_evaluated_is_neither_registered_nor_promoted_and_status_says_what_is_next(world: World) -> None:
    words = Tokenizer(WordLevel({word: number for number, word in enumerate(("hi", "hello", "?"))}, unk_token="?"))
    words.save(str(world.verifier / "tokenizer.json"))
    recipe, short = str(world.recipe), ("--set", "data.max_length=256")
    for command in ("register", "promote"):
        refused = world.run(command, recipe, *short, "--json")
        assert refused.returncode == 1 and "is not evaluated yet: preflight has not been run" in refused.stderr
        told = json.loads(refused.stdout)
        assert told["mend"] == f"draftsmith retrain {recipe}" and told["error"] in refused.stderr
    told = world.say("status", recipe, *short)
    assert "nothing is registered as chat yet" in told
    assert f"next: `draftsmith retrain {recipe} --set data.max_length=256`; `draftsmith plan" in told
    assert all(f"│ {name} " in told for name in (*stages.ORDER, "register", "promote"))


@pytest.fixture
def read_only(world: World) -> Iterator[Path]:
    """The world's state root, registry and all, where it may only be read; needs the right to mount it so."""
    world.register()
    store = Store(str(world.home / "store"), scratch=world.home / "scratch")
    (store.workspace("dataset", "d" * 64) / "rows").write_text("rows")
    store.publish(store.workspace("dataset", "d" * 64), "dataset", "d" * 64)
    mount = ["mount", "-o", "bind", str(world.home), str(world.home)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", str(world.home)], check=True)
        yield world.home
    finally:
        subprocess.run(["umount", str(world.home)], check=True)


def test_what_only_reads_works_where_the_state_root_may_only_be_read(world: World, read_only: Path) -> None:
    with pytest.raises(OSError, match="Read-only"):
        (read_only / "x").touch()
    found = world.ask("fingerprint", str(world.verifier))
    assert found["parts"]["weights"] == Run(load_recipe(world.recipe), world.root).fingerprint.parts["weights"]
    assert world.say("why", str(world.recipe)) == "chat version 1 is in step with its verifier and runtime\n"
    refused = world.run("history", MODEL)  # MLflow's own client writes
    assert refused.returncode == 1 and "point DRAFTSMITH_HOME at one that is" in refused.stderr
    store = Store(str(read_only / "store"), scratch=read_only / "scratch")
    (kept,) = store.artifacts()
    assert (store.path(kept) / "rows").read_text() == "rows" and not store.busy("dataset", "d" * 64)


def test_both_answer_within_two_seconds_of_processor_time(world: World) -> None:
    """Wall time is that of a machine that does nothing else."""
    world.register()
    world.say("plan", str(world.recipe))
    time.sleep(2.1)  # files that were written just now are not remembered yet
    for command in ("why", "plan"):
        world.say(command, str(world.recipe))
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        world.say(command, str(world.recipe))
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2.0


def test_the_quick_look_sees_what_mlflow_sees(world: World) -> None:
    for number in range(3):
        world.register(note=f"line {number}\nand 'quotes' \"too\"")
    tracking = Tracking(world.settings)
    tracking.client.set_registered_model_alias(MODEL, "challenger", "2")
    tracking.client.delete_model_version(MODEL, "1")
    aliases = MlflowAliases(tracking, actor="test")
    seen = look(world.settings, MODEL)
    assert seen.aliases == aliases.aliases(MODEL) == {"champion": "3", "challenger": "2"}
    assert list(seen.tags) == aliases.versions(MODEL) == ["2", "3"]
    assert seen.tags == {version: aliases.tags(MODEL, version) for version in ("2", "3")}
    assert look(world.settings, "nothing").aliases == {}
    server = Server(world.home)
    server.start()
    try:
        remote = world.settings.model_copy(update={"tracking_uri": server.uri})
        assert look(remote, MODEL) == seen, "through the server's REST API"
        assert look(remote, "nothing").aliases == {}
    finally:
        server.stop()
    with pytest.raises(RegistryError, match="failed to show"):
        look(remote, MODEL)


def test_what_is_no_plan_is_said(world: World) -> None:
    for content, words in (("{}", "is not a plan of this version"), (None, "no plan can be read")):
        path = world.root / "other.json"
        if content is not None:
            path.write_text(content)
        else:
            path.unlink()
        done = world.run("apply", str(path))
        assert done.returncode == 2 and words in done.stderr, done.stderr


def test_diff_names_parts_and_tensors(world: World) -> None:
    other = shutil.copytree(world.verifier, world.root / "other")
    save_file({"model.norm.weight": torch.zeros(64)}, other / "model.safetensors")
    found = world.ask("diff", str(world.verifier), str(other))
    assert [change["part"] for change in found["changes"]] == ["weights"]
    assert found["tensors"]["changed"] == ["model.norm.weight"] and found["tensors"]["values_compared"]
    assert world.say("diff", str(other), str(other)) == "no difference: a draft for one fits the other\n"


def test_what_other_hands_moved_to_an_unproven_version_does_not_count(world: World) -> None:
    world.register()
    unproven = world.register(**{"gate.outcome": "fail"})
    home = world.home
    elsewhere = "e" * 64
    here = Run(load_recipe(world.recipe), home).runtime.key
    assert serving_version(look(world.settings, MODEL), home, lambda: here) is None, "nothing of ours ever served here"
    tracking = Tracking(world.settings)
    tracking.client.set_registered_model_alias(MODEL, "champion", "1")
    registry = MlflowAliases(tracking, actor="test")
    settle(registry, MODEL, runtime_key=here, home=home)
    other = world.register(**{"runtime.key": elsewhere})
    for version, runtime, serving in ((unproven, here, "1"), (other, here, "1"), (other, elsewhere, other)):
        registry.set_alias(MODEL, "champion", version)
        assert serving_version(look(world.settings, MODEL), home, lambda key=runtime: key) == serving
        assert settle(registry, MODEL, runtime_key=runtime, home=home).version == serving, "promotion says the same"
