"""The train stage over engines that it keeps itself: processes that answer as vLLM does, killed in mid-epoch."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from speculators_core import stages
from speculators_core.config import Recipe
from speculators_core.data.rows import RowRecord, RowWriter
from speculators_core.engine.runtime import RuntimeInfo
from speculators_core.errors import DiskSpaceError
from speculators_core.run import Run
from speculators_core.stages.states import capture_digest
from speculators_core.states.sets import StateSet
from speculators_core.types import ArtifactRef
from tests.engine.loop import await_silence
from tests.environment import ROOT, child_environment
from tests.integration.test_training import assert_same, last_checkpoint, states, verifier

__all__ = ["states", "verifier"]  # fixtures
INFO = RuntimeInfo(vllm="1", build="b", device="cpu", model_runner="v1", torch="t", transformers="f")


@pytest.fixture
def run_of(verifier: Path, states: Path, tmp_path: Path) -> Callable[..., Run]:
    """Runs over one state root, with a runtime whose server answers with the set's states."""
    served = tmp_path / "verifier"
    shutil.copytree(verifier, served)
    (served / "tokenizer.json").write_text("{}")
    (served / "chat_template.jinja").write_text("{{ messages }}")
    python = tmp_path / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    paths = f"{ROOT}:{ROOT / 'hs_connectors' / 'src'}"
    python.write_text(
        f"#!/bin/sh\nif [ \"$1\" = -P ]; then echo 'DRAFTSMITH{INFO.model_dump_json()}'; exit; fi\n"
        f"export PYTHONPATH={paths} RECORDED_STATES={states} RECORDED_DELAY=0.05\n"
        f'exec {sys.executable} -m tests.recorded_engine "$@"\n'
    )
    python.chmod(0o755)

    def make(progress: Callable[[int, int], None] | None = None, **hidden_states: Any) -> Run:
        recipe = {
            "name": "tiny",
            "deployment": "tiny",
            "verifier": {"path": str(served)},
            "runtime": {"python": str(python)},
            "data": {"sources": ["nowhere.jsonl"]},
            # several shards, so that engines share; what is recorded holds no next tokens to compare
            "capture": {"concurrency": 2, "kv_cache_gib": 0.1, "shard_tokens": 128, "parity_rows": 0},
            "algorithm": {"kind": "eagle3", "aux_layers": [2, 3, 4]},
            "training": {
                "epochs": 10,
                "row_tokens": 64,
                "precision": "fp32",
                "log_every_steps": 1,
                "threads": 1,
                "checkpoint": {"every_steps": 20, "keep_when_finished": True},
            },
            "hidden_states": hidden_states,
        }
        return Run(Recipe.model_validate(recipe), tmp_path / "home", progress=progress)

    return make


def publish(run: Run, states: Path) -> tuple[ArtifactRef, ArtifactRef]:
    """(data set, captured set) of the same rows."""
    rows, captured = run.store.workspace("dataset", "d" * 64), run.store.workspace("states", "s" * 64)
    writer = RowWriter()
    for row in StateSet.open(states).rows():
        record = RowRecord(f"r{row.index}", "all", row.split, f"c{row.index}", (1,))  # type: ignore[arg-type]
        writer.add(record, row.input_ids.tolist(), row.loss_mask.int().tolist())
    writer.write(rows, [], [], {})
    shutil.copytree(states, captured, dirs_exist_ok=True)
    return run.store.publish(rows, "dataset", "d" * 64, {}), run.store.publish(captured, "states", "s" * 64, {})


def test_an_engine_killed_in_mid_epoch_comes_back_on_another_port_and_the_draft_has_the_same_bits(
    run_of: Callable[..., Run], states: Path, tmp_path: Path
) -> None:
    killed: list[int] = []

    def kill(done: int, total: int) -> None:
        if 5 <= done < total // 2 and not killed:
            (record,) = [json.loads(path.read_text()) for path in (tmp_path / "home" / "engines").glob("vllm-*.json")]
            killed.append(record["group"])
            os.killpg(record["group"], signal.SIGKILL)

    run = run_of(kill, mode="online", window_tokens=100, engines=[{"cores": [0]}], trainer_cores=[0])
    dataset, captured = publish(run, states)
    offline = stages.train(run_of(mode="offline"), captured)
    online = stages.train(run, dataset)
    assert killed and len(list((tmp_path / "home" / "logs").glob("vllm-*.log"))) == 2
    directory = run.store.path(online.ref)
    assert_same(last_checkpoint(run.store.path(offline.ref)), last_checkpoint(directory))
    assert not list((tmp_path / "home" / "engines").glob("*.json")), "no engine is left behind"
    assert not list((tmp_path / "home").rglob(".online")) and not (directory / ".online").exists()
    assert stages.train(run_of(mode="hybrid", cache_gib=1), dataset).cached, "how states travel is no part of the key"


def test_rows_that_cannot_all_be_kept_are_refused_before_an_engine_starts(
    run_of: Callable[..., Run], states: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(mode="hybrid", cache_gib=1)
    dataset, _ = publish(run, states)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(DiskSpaceError, match=r"mend: .*hidden_states\.cache_gib"):
        stages.train(run, dataset)
    assert not list((run.home / "logs").glob("vllm-*"))


def test_parts_of_two_runs_are_captured_once_beside_each_other_and_apart_from_the_whole(
    run_of: Callable[..., Run], states: Path, tmp_path: Path
) -> None:
    run = run_of(engines=2)
    dataset, _ = publish(run, states)
    key = capture_digest(run, dataset)
    workspace = run.store.workspace("states", key)
    left = workspace / ".share-1" / ".records" / "of-a-part-that-was-killed"
    left.mkdir(parents=True)
    kept: list[bool] = []

    def look() -> None:
        store = run_of().store
        kept.append(store.busy("states", key) and not store.sweep_workspace("states", key))

    assert stages.missing_shares(run, dataset) == (0, 1)
    with ThreadPoolExecutor(3) as pool:
        same, again, other = pool.map(
            lambda number: stages.capture_share(run_of(engines=2), dataset, number, look), (0, 0, 1)
        )
    assert min(same, again) == 0 < max(same, again) and same + again + other == 28
    assert kept and all(kept) and not left.exists()
    assert len(list((run.home / "logs").glob("vllm-*.log"))) == 2
    assert {entry.key for entry in run.ledger.entries()} == {f"{key}-share-0", f"{key}-share-1"}
    left.mkdir(parents=True)
    captured = run.store.path(stages.capture(run_of(), dataset).ref)
    names = {path.name for path in captured.iterdir()}
    assert all(name == "states.json" or name.startswith("shard-") for name in names), names
    assert stages.capture_share(run, dataset, 0, look) == 0 and not workspace.exists(), "a retry that came too late"


CAPTURING = """
import sys
from speculators_core.config import Recipe
from speculators_core.types import ArtifactRef
from tasks import stages
from tasks.adapters.prefect_server import prefect_api
from tasks.adapters.settings import apply_environment
from tasks.policies import pipeline_flow

@pipeline_flow("capturing")
def capturing(recipe: Recipe, dataset: ArtifactRef) -> None:
    stages.captured(recipe, dataset)

with prefect_api(apply_environment()) as api:
    api.wait()
    capturing(Recipe.model_validate_json(sys.argv[1]), ArtifactRef.model_validate_json(sys.argv[2]))
"""


def test_a_signal_while_several_engines_start_is_heard_by_all_of_them(
    run_of: Callable[..., Run], states: Path, tmp_path: Path
) -> None:
    """Each is waited for in a thread of its own, which Prefect cannot stop and waits for."""
    run = run_of(engines=2)
    dataset, _ = publish(run, states)
    python, started = tmp_path / "env" / "bin" / "python", tmp_path / "started"
    python.write_text(python.read_text().replace("exec", f"echo x >> {started}; exec sleep 300; exec"))
    argv = [sys.executable, "-c", CAPTURING, run.recipe.model_dump_json(), dataset.model_dump_json()]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(argv, env=child_environment(run.home), cwd=ROOT, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 600
        while len(list((run.home / "engines").glob("vllm-*.json"))) < 2 or started.read_text() != "x\nx\n":
            assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()[-3000:]
            time.sleep(0.1)
        signalled = time.monotonic()
        process.terminate()
        process.wait(120)
        assert time.monotonic() - signalled < 30
        assert len(list((run.home / "logs").glob("vllm-*.log"))) == 2, "one each, and none that was tried again"
        await_silence(run.home)
        assert not list((run.home / "engines").glob("*.json"))
    finally:
        process.kill()
        process.wait()
