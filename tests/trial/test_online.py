"""Training on states that a real engine streams, through its death in mid-epoch; against the same training offline."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from speculators_core import stages
from speculators_core.config import load_recipe
from speculators_core.run import Run
from speculators_core.training.callbacks.metrics_log import read_metrics
from tests.engine.loop import RECIPE, engines_of
from tests.environment import ROOT

pytestmark = [pytest.mark.engine, pytest.mark.trial]

SETTINGS = (
    "data.max_rows=60",
    "data.evaluation_prompts=2",
    "data.validation_share=0.1",
    "data.max_length=300",
    "draft_vocabulary=2048",
    "capture.parity_rows=2",
    "capture.concurrency=8",
    "training={epochs: 2, row_tokens: 512, log_every_steps: 1, checkpoint: {every_steps: 5}}",
    "training.validation.walk_rows=2",
)
STREAMED = (
    "hidden_states={mode: hybrid, cache_gib: 0.05, window_tokens: 2000}",
    "hidden_states.engines=[{cores: [0]}]",
    "hidden_states.trainer_cores=[1]",
)


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # where the recipe's paths begin


def losses_of(run: Run, states: Any) -> list[dict[str, Any]]:
    training = run.store.path(stages.train(run, states).ref)
    return [line for line in read_metrics(training / "metrics.jsonl") if line["kind"] == "train"]


def kill_engine_at(home: Path, step: int) -> Callable[[int, int], None]:
    """A progress callback that kills the engine's process group, once."""
    killed: list[int] = []

    def look(done: int, total: int) -> None:
        if done >= step and not killed:
            (record,) = [json.loads(path.read_text()) for path in (home / "engines").glob("vllm-*.json")]
            killed.append(record["group"])
            os.killpg(record["group"], signal.SIGKILL)

    return look


def test_an_engine_killed_in_mid_epoch_comes_back_and_the_losses_are_those_of_captured_states(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """To rounding: which rows share an engine step decides the last bits of a live engine's states in bfloat16."""
    home = tmp_path / "home"
    offline = Run(load_recipe(RECIPE, SETTINGS), home)
    dataset = stages.prepare(offline).ref
    expected = losses_of(offline, stages.capture(offline, dataset).ref)
    streamed = Run(load_recipe(RECIPE, (*SETTINGS, *STREAMED)), home, progress=kill_engine_at(home, 3))
    with caplog.at_level(logging.WARNING):
        found = losses_of(streamed, dataset)
    assert [text for text in caplog.messages if "engine 0 is started again" in text], "the kill came too late"
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine["step"], mine["tokens"]) == (theirs["step"], theirs["tokens"])
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=0.02)
    assert engines_of(home) == [] and not list((home / "engines").glob("*.json"))
    only_look = replace(streamed, only_look=True, progress=None)
    assert stages.train(only_look, dataset).cached, "how states travel is no part of a draft's key"
    assert [path for path in home.rglob("*") if path.name == ".online"] == []
