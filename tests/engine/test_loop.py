"""The whole loop on the real engine, small: every stage real, then found again, then killed and gone on with."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from loop import ROOT, await_silence, command, engines_of, run, start

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("loop-home")
    yield path
    assert not engines_of(path), "a process outlived its command"


def tail(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:]


def test_killed_in_training_it_goes_on_and_ends_promoted(home: Path) -> None:
    first = start(home, home / "first.log", "retrain", "--json")
    deadline = time.monotonic() + 600
    while not (checkpoints := list(home.glob("store/.work/training/*/data/checkpoints/*/*.json"))):
        assert first.poll() is None, f"the loop ended before it was killed: {tail(home / 'first.log')}"
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert checkpoints
    first.send_signal(signal.SIGKILL)
    first.wait()
    await_silence(home)

    second = run(home, "retrain", "--json")
    assert second.returncode == 0, second.stderr[-3000:]
    report = json.loads(second.stdout)
    cached = {stage["name"]: stage["cached"] for stage in report["stages"]}
    assert cached["preflight"] and cached["prepare"] and cached["capture"], "what was finished is not done again"
    assert not cached["train"] and not cached["evaluate"]
    assert report["acceptance"]["al"] >= 1.0 and report["acceptance"]["prompts"] == 12
    assert report["lossless"]["prompts"] == 12
    assert report["gate"]["passed"], report["gate"]["reasons"]
    assert report["registry"] | {"version": "1", "aliases": ["champion"]} == report["registry"]
    assert json.loads((home / "small" / "report.json").read_text()) == report
    assert set(report) >= {"verifier", "runtime", "draft", "speed", "training", "seconds"}
    assert report["speed"]["with"] > 0 and report["speed"]["without"] > 0


def test_a_second_run_finds_everything(home: Path) -> None:
    again = run(home, "retrain", "--json")
    assert again.returncode == 0, again.stderr[-3000:]
    report = json.loads(again.stdout)
    assert all(stage["cached"] for stage in report["stages"]), report["stages"]
    assert report["registry"]["version"] == "1"


def test_status_tells_what_is_done_and_registered(home: Path) -> None:
    done = run(home, "status", "--json")
    assert done.returncode == 0, done.stderr[-2000:]
    lines = {line["name"]: line for line in json.loads(done.stdout)["lines"]}
    assert lines["evaluate"]["state"] == "done" and "champion" in lines["version 1"]["text"]
    other = run(home, "status", "--json", **{"training.max_steps": "13"})
    lines = {line["name"]: line["state"] for line in json.loads(other.stdout)["lines"]}
    assert (lines["capture"], lines["train"], lines["export"]) == ("done", "to do", "to do")


def test_a_tampered_draft_is_made_again(home: Path) -> None:
    weights = next(home.glob("store/draft/*/data/model.safetensors"))
    good = weights.read_bytes()
    weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    again = run(home, "export", "--json")
    assert again.returncode == 0, again.stderr[-2000:]
    last = json.loads(again.stdout)[-1]
    assert last["name"] == "export" and not last["cached"]
    assert next(home.glob("store/draft/*/data/model.safetensors")).read_bytes() == good


def test_mlflow_away_keeps_the_draft_and_says_how_to_go_on(home: Path) -> None:
    argv, env = command(home, "register")
    env["MLFLOW_TRACKING_URI"] = "http://127.0.0.1:9"
    away = subprocess.run(argv, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert away.returncode == 1
    assert "MLflow" in away.stderr and "mend:" in away.stderr
    back = run(home, "register", "--json")
    assert back.returncode == 0 and json.loads(back.stdout)["version"] == "1", back.stderr[-2000:]


def test_a_draft_that_left_in_another_layout_is_adopted_and_serves_as_before(home: Path, verifier_dir: Path) -> None:
    """Our draft as SafeAILab's code writes one, taken back: another artifact of the same bytes, measured anew."""
    before = json.loads((home / "small" / "report.json").read_text())
    theirs = home / "theirs"
    convert = [sys.executable, "-m", "flows.cli", "convert", before["draft"]["path"], str(theirs), "--to", "safeai"]
    env = command(home, "adopt")[1]
    left = subprocess.run(
        [*convert, "--verifier", str(verifier_dir)],
        env=env, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert left.returncode == 0, left.stderr[-2000:]
    assert json.loads((theirs / "config.json").read_text())["architectures"] == ["LlamaForCausalLMEagle3"]
    adopted = run(home, "adopt", str(theirs), "--json")
    assert adopted.returncode == 0, adopted.stderr[-3000:]
    report = json.loads(adopted.stdout)
    assert [stage["name"] for stage in report["stages"]][:4] == ["convert", "preflight", "prepare", "evaluate"]
    assert report["training"] is None and report["registry"]["version"] == "2"
    assert report["draft"]["digest"] != before["draft"]["digest"]
    for name in ("config.json", "model.safetensors"):
        ours, back = (Path(found["draft"]["path"]) / name for found in (before, report))
        assert ours.read_bytes() == back.read_bytes(), name
    first, second = before["acceptance"], report["acceptance"]
    assert all(first[name] == second[name] for name in ("measured_by", "k", "prompts"))
    # the engine batches by arrival, and a near tie of two logits falls either way: a reply or two may differ
    assert second["al"] == pytest.approx(first["al"], rel=0.03)
    other = run(home, "adopt", str(theirs), **{"algorithm": "{kind: peagle}"})
    assert other.returncode == 2 and "the draft is of eagle3" in other.stderr
