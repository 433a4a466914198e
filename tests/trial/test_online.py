"""Training on states that a real engine streams, through deaths in mid-epoch, over every store, against captured ones.

Each row has an engine step to itself here, and no beginning that another row left: both decide the last bits of a live
engine's states. So the losses are the same to the last bit, whatever road the states came by.
"""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from hs_connectors import open_backend
from speculators_core import stages
from speculators_core.config import load_recipe
from speculators_core.errors import TrainingError
from speculators_core.run import Run
from speculators_core.training.callbacks.metrics_log import read_metrics
from tests.engine.loop import RECIPE, engines_of
from tests.environment import ROOT
from tests.services import S3Server

pytestmark = [pytest.mark.engine, pytest.mark.trial]

SETTINGS = (
    "data.max_rows=36",
    "data.evaluation_prompts=2",
    "data.validation_share=0.15",
    "data.max_length=300",
    "draft_vocabulary=2048",
    "capture={parity_rows: 2, concurrency: 8, max_num_seqs: 1, prefix_caching: false}",
    "training={epochs: 2, row_tokens: 512, threads: 1, log_every_steps: 1, checkpoint: {every_steps: 4}}",
    "training.validation.walk_rows=0",
)
ONLINE = ("hidden_states={mode: online, window_tokens: 2000}",)
GENTLY = ("training.optimizer.learning_rate=2e-4",)
"""At the default rate this seed stands at a fork: 24 steps end 4 % higher with fp8, and with white noise of its size
from 1.5 % lower to 0.2 % higher. With nine other seeds fp8 stays within 0.2 %, here (three seeds) within 0.05 %."""
HYBRID = ("hidden_states={mode: hybrid, cache_gib: 0.03, window_tokens: 2000}",)

Losses = list[tuple[int, int, float]]
"""Step, tokens and loss of each step, and the loss of each validation."""


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # where the recipe's paths begin


def run_in(home: Path, *overrides: str) -> Run:
    return Run(load_recipe(RECIPE, (*SETTINGS, *overrides)), home)


def losses_of(run: Run, states: Any) -> Losses:
    result = stages.train(run, states)
    lines = list(read_metrics(run.store.path(result.ref) / "metrics.jsonl"))
    print(f"\n{run.recipe.hidden_states.mode} {run.recipe.capture.backend} {run.recipe.capture.codec}:", lines[-1])
    return [(line["step"], line["tokens"], line["loss"]) for line in lines]


@pytest.fixture(scope="module")
def train_offline(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Losses]:
    """Train on captured states; they are captured by the first call."""
    home = tmp_path_factory.mktemp("offline")

    def train(*overrides: str) -> Losses:
        run = run_in(home, *overrides)
        return losses_of(run, stages.capture(run, stages.prepare(run).ref).ref)

    return train


@pytest.fixture(scope="module")
def offline(train_offline: Callable[..., Losses]) -> Losses:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return train_offline()


def killing(home: Path, name: str, step: int) -> tuple[Callable[[int, int], None], list[int]]:
    """A progress callback that kills a supervised process of that name once, and the groups that it has killed."""
    killed: list[int] = []

    def look(done: int, total: int) -> None:
        if done >= step and not killed:
            (record,) = [json.loads(path.read_text()) for path in (home / "engines").glob(f"{name}-*.json")]
            killed.append(record["group"])
            os.killpg(record["group"], signal.SIGKILL)

    return look, killed


def assert_nothing_left(home: Path) -> None:
    assert engines_of(home) == [] and not list((home / "engines").glob("*.json"))
    assert [path for path in home.rglob("*") if path.name == ".online"] == []


def test_an_engine_killed_in_mid_epoch_comes_back_on_another_port(
    offline: Losses, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    look, killed = killing(tmp_path, "vllm", 3)
    run = run_in(tmp_path, *ONLINE)
    dataset = stages.prepare(run).ref
    with caplog.at_level(logging.WARNING):
        found = losses_of(replace(run, progress=look), dataset)
    assert killed and [text for text in caplog.messages if "engine 0 is started again" in text]
    assert found == offline
    assert_nothing_left(tmp_path)


def test_a_hybrid_training_killed_in_mid_epoch_goes_on(offline: Losses, tmp_path: Path) -> None:
    look, killed = killing(tmp_path, "trainer", 6)
    run = run_in(tmp_path, *HYBRID)
    dataset = stages.prepare(run).ref
    with pytest.raises(TrainingError, match="ended without a word"):
        stages.train(replace(run, progress=look), dataset)
    assert killed
    assert losses_of(run, dataset) == offline
    assert_nothing_left(tmp_path)
    looking = Run(load_recipe(RECIPE, (*SETTINGS, *ONLINE)), tmp_path, only_look=True)
    assert stages.train(looking, dataset).cached, "how states travel is no part of a draft's key"


def test_fp8_learns_as_much(train_offline: Callable[..., Losses], tmp_path: Path) -> None:
    """Validated on rounded states as well: what they do to the teacher counts too."""
    expected = train_offline(*GENTLY)
    run = run_in(tmp_path, *ONLINE, *GENTLY, "capture.codec=fp8", "capture.backend=shm")
    found = losses_of(run, stages.prepare(run).ref)
    assert [line[:2] for line in found] == [line[:2] for line in expected] and found != expected
    assert found[-1][2] == pytest.approx(expected[-1][2], rel=0.005), "the last line is a validation's"


@pytest.mark.parametrize("backend", ["shm", "mooncake"])
def test_a_store_that_the_run_makes_itself(offline: Losses, tmp_path: Path, backend: str) -> None:
    run = run_in(tmp_path, *ONLINE, f"capture.backend={backend}")
    assert losses_of(run, stages.prepare(run).ref) == offline
    assert_nothing_left(tmp_path)


def test_an_s3_server(offline: Losses, tmp_path: Path, s3_environment: S3Server) -> None:
    root = f"s3://{s3_environment.bucket}/{uuid4().hex}"
    run = run_in(tmp_path, *ONLINE, "capture.backend=s3", f"capture.backend_config={{root: {root}}}")
    assert losses_of(run, stages.prepare(run).ref) == offline
    assert_nothing_left(tmp_path)
    assert list(open_backend("s3", {"root": root}).entries()) == []
