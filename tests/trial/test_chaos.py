"""Killed in every stage, the loop goes on and does nothing finished twice; stopped, it leaves nothing behind."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from loop import await_silence, await_text, run, start

pytestmark = [pytest.mark.engine, pytest.mark.trial]

POINTS = [
    ("preflight", "stage=preflight start", 8.0),
    ("prepare", "stage=prepare start", 0.2),
    ("capture", "shard 1 of", 0.0),
    ("train", "stage=train start", 15.0),
    ("export", "stage=export start", 0.2),
    ("baseline", "stage=baseline start", 15.0),
    ("measure", "stage=measure start", 15.0),
    ("evaluate", "stage=evaluate start", 0.2),
    ("register", "stage=evaluate done", 1.0),
    ("promote", "registered smollm2-chat version", 0.0),
]
LONGER = {"training.max_steps": "40", "capture.shard_tokens": "4096"}


def test_kill_9_in_each_stage(tmp_path: Path) -> None:
    for name, text, delay in POINTS:
        log = tmp_path / f"{name}.log"
        process = start(tmp_path / "home", log, "retrain", **LONGER)
        await_text(log, text, process)
        time.sleep(delay)
        assert process.poll() is None, f"{name} was over before it was killed"
        process.send_signal(signal.SIGKILL)
        process.wait()
        await_silence(tmp_path / "home")
    last = run(tmp_path / "home", "retrain", "--json", **LONGER)
    assert last.returncode == 0, last.stderr[-3000:]
    report = json.loads(last.stdout)
    cached = {stage["name"]: stage["cached"] for stage in report["stages"]}
    assert cached == cached | dict.fromkeys(("preflight", "prepare", "capture", "train", "export"), True)
    resumed = (tmp_path / "train.log").read_text()
    assert "shard 1 of" not in resumed, "a finished shard was captured again"
    assert report["gate"]["passed"] and report["registry"]["aliases"] == ["champion"]


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(("text", "delay"), [("stage=preflight start", 5.0), ("stage=train start", 12.0)])
def test_a_stop_ends_engine_and_trainer_within_30_s(tmp_path: Path, stop: int, text: str, delay: float) -> None:
    log = tmp_path / "run.log"
    process = start(tmp_path / "home", log, "retrain", **{**LONGER, "training.max_steps": "400"})
    await_text(log, text, process)
    time.sleep(delay)
    started = time.monotonic()
    process.send_signal(stop)
    assert process.wait(30) != 0
    await_silence(tmp_path / "home", 30 - (time.monotonic() - started))


def test_two_at_once_compute_once(tmp_path: Path) -> None:
    logs = [tmp_path / "a.log", tmp_path / "b.log"]
    processes = [start(tmp_path / "home", log, "capture", **LONGER) for log in logs]
    threads = [threading.Thread(target=process.wait, args=(900,)) for process in processes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [process.returncode for process in processes] == [0, 0]
    texts = [log.read_text() for log in logs]
    for stage in ("preflight", "prepare", "capture"):
        assert sum(f"stage={stage} done" in text for text in texts) == 1, stage
        assert sum(f"stage={stage} cached" in text for text in texts) == 1, stage
