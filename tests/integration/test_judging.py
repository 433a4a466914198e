"""What is measured of a registered version, with planted measurements, on a real registry."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from speculators_core import stages
from speculators_core.config import load_recipe
from speculators_core.lifecycle.matrix import GATE_TAG
from speculators_core.lifecycle.promotion import may_serve
from speculators_core.run import Run
from tasks.adapters.settings import settings
from tasks.judging import compared_with, measure_version
from tasks.observe import tracking
from tasks.versions import INCUMBENT_TAG, NO_INCUMBENT, open_aliases
from tests.integration.planning_world import MODEL, TEMPLATE, World, serve_runtime
from tests.integration.watch_children import plant_evaluation, register_draft


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with serve_runtime() as runtime:
        world = World(tmp_path, runtime)
        monkeypatch.setenv("DRAFTSMITH_HOME", str(world.home))
        for cache in (settings, tracking):
            cache.cache_clear()
        yield world
    for cache in (settings, tracking):
        cache.cache_clear()


def test_a_version_that_failed_against_another_is_not_proven_by_a_measurement_of_its_own(world: World) -> None:
    recipe = load_recipe(world.recipe, ["gate={speed: report, min_prompts: 50}", "evaluation.baselines=[]"])
    draft, aliases = register_draft(world, al="1.60"), open_aliases()
    aliases.set_tags(MODEL, "1", {GATE_TAG: "fail", INCUMBENT_TAG: "7"})

    def measured() -> tuple[str | None, str]:
        """Outcome alone, here and now, and the runtime's key."""
        plant_evaluation(Run(recipe, world.home, only_look=True, check=False), draft, 0.40)
        run = Run(recipe, world.home)
        return measure_version(run, MODEL, "1", stages.prepare(run).ref).outcome, run.runtime.key

    outcome, runtime = measured()
    assert outcome == "fail"
    fingerprint = Run(recipe, world.home).fingerprint.digest
    assert not may_serve(aliases.tags(MODEL, "1"), verifier_fingerprint=fingerprint, runtime_key=runtime)[0]
    aliases.set_tags(MODEL, "1", {INCUMBENT_TAG: NO_INCUMBENT})
    assert measured()[0] == "pass", "with nothing to compare it with, it is good enough"

    aliases.set_tags(MODEL, "1", {INCUMBENT_TAG: "7"})
    (world.verifier / "chat_template.jinja").write_text(TEMPLATE + "!")
    assert measured()[0] == "inconclusive", "nobody has compared the two on this verifier"


def test_what_it_was_compared_with_is_compared_again_while_it_is_there(world: World) -> None:
    one, two = world.register(), world.register(**{INCUMBENT_TAG: "1"})
    aliases = open_aliases()
    assert (compared_with(aliases, MODEL, one), compared_with(aliases, MODEL, two)) == (None, one)
    tracking().client.delete_model_version(MODEL, one)
    assert compared_with(aliases, MODEL, two) is None
