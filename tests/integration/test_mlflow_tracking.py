from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from speculators_core.errors import RegistryError
from tasks.adapters.follow import OFFSET_TAG, Follower, follow_metrics
from tasks.adapters.settings import Settings, read_settings
from tasks.adapters.tracking import ATTEMPT_TAG, DatasetFacts, StageRun, Tracking
from tests.environment import child_environment

CHILDREN = Path(__file__).with_name("mlflow_children.py")


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(CHILDREN), *arguments], stdout=subprocess.PIPE, text=True, env=child_environment()
    )


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return read_settings({"DRAFTSMITH_HOME": str(tmp_path_factory.mktemp("home"))})


@pytest.fixture(scope="module")
def tracking(settings: Settings) -> Tracking:
    return Tracking(settings)


@pytest.fixture
def run(tracking: Tracking, request: pytest.FixtureRequest) -> Iterator[StageRun]:
    parent = tracking.open_parent(request.node.name, name="recipe", tags={})
    with tracking.stage(parent, "train", tags={}) as child:
        yield child


def artifacts(run: StageRun, tracking: Tracking) -> Path:
    """Local directory of the run's artifacts."""
    return Path(tracking.client.get_run(run.run_id).info.artifact_uri.removeprefix("file://"))


def test_four_processes_may_open_a_fresh_store_at_once(tmp_path: Path) -> None:
    children = [start("open_store", str(tmp_path)) for _ in range(4)]
    time.sleep(2)  # all have imported MLflow, or wait for the processor
    (tmp_path / "go").touch()
    found = [child.communicate(timeout=60)[0].strip() for child in children]
    assert [child.returncode for child in children] == [0, 0, 0, 0]
    assert len(set(found)) == 1 and found[0], "all use the same experiment"


def test_a_recipe_has_one_parent_and_each_attempt_its_own_child(tracking: Tracking) -> None:
    parent = tracking.open_parent("1" * 64, name="demo", tags={"deployment": "d"})
    with pytest.raises(ValueError, match="broken"), tracking.stage(parent, "train", tags={}) as first:
        raise ValueError("broken")
    tracking.close_run(parent, "FAILED")
    assert tracking.open_parent("1" * 64, name="demo", tags={}) == parent
    with tracking.stage(parent, "train", tags={"prefect.flow_run_id": "p"}) as second:
        pass
    with tracking.stage(parent, "export", tags={}) as other:
        pass
    assert tracking.open_parent("2" * 64, name="demo", tags={}) != parent

    info = {run.run_id: tracking.client.get_run(run.run_id) for run in (first, second, other)}
    assert len(info) == 3
    assert [run.info.status for run in info.values()] == ["FAILED", "FINISHED", "FINISHED"]
    assert [run.data.tags[ATTEMPT_TAG] for run in info.values()] == ["1", "2", "1"]
    assert {run.data.tags["mlflow.parentRunId"] for run in info.values()} == {parent}
    assert info[second.run_id].data.tags["prefect.flow_run_id"] == "p"
    assert info[first.run_id].data.tags["draftsmith.error"] == "ValueError: broken"
    assert tracking.client.get_run(parent).info.status == "RUNNING"


def test_an_interrupted_stage_is_killed_not_failed(tracking: Tracking) -> None:
    parent = tracking.open_parent("3" * 64, name="demo", tags={})
    with pytest.raises(KeyboardInterrupt), tracking.stage(parent, "train", tags={}) as run:
        raise KeyboardInterrupt
    assert tracking.client.get_run(run.run_id).info.status == "KILLED"


def test_the_run_of_a_killed_process_is_closed_when_the_parent_is_reopened(tracking: Tracking) -> None:
    parent = tracking.open_parent("4" * 64, name="demo", tags={})
    home = tracking.settings.home
    process = start("stay_in_stage", str(home), parent)
    while not (home / "in-stage").exists():
        assert process.poll() is None
        time.sleep(0.05)
    run_id = (home / "in-stage").read_text()
    assert tracking.open_parent("4" * 64, name="demo", tags={}) == parent
    assert tracking.client.get_run(run_id).info.status == "RUNNING", "its process lives"
    process.kill()
    process.communicate()
    tracking.open_parent("4" * 64, name="demo", tags={})
    assert tracking.client.get_run(run_id).info.status == "KILLED"


def test_metrics_arrive_while_the_trainer_writes(tracking: Tracking, run: StageRun, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with follow_metrics(path, run, interval_s=0.05) as follower, path.open("w") as stream:
        stream.write(json.dumps({"kind": "train", "step": 1, "time": 10.0, "loss": 2.0, "epoch": 0}) + "\n")
        stream.flush()
        deadline = time.monotonic() + 10
        while not tracking.client.get_run(run.run_id).data.metrics:
            assert time.monotonic() < deadline, "live: before the trainer ends"
            time.sleep(0.05)
        line = {"kind": "validation", "step": 1, "time": 11.0, "ok": True, "eal": 1.5, "per_position": [0.5, 0.25]}
        stream.write(json.dumps(line) + "\n" + '{"step": 2, "ti')
    found = tracking.client.get_run(run.run_id).data.metrics
    assert found == {
        "train/loss": 2.0,
        "train/epoch": 0.0,
        "validation/eal": 1.5,
        "validation/per_position/0": 0.5,
        "validation/per_position/1": 0.25,
    }
    assert follower.skipped == 0, "the torn last line waits, it is not an error"


def test_following_again_doubles_nothing(tracking: Tracking, run: StageRun, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"

    def history() -> list[tuple[int, float]]:
        points = tracking.client.get_metric_history(run.run_id, "loss")
        return sorted((point.step, point.value) for point in points)

    path.write_text("".join(json.dumps({"step": s, "time": 1.0 + s, "loss": float(s)}) + "\n" for s in range(3)))
    with path.open("a") as stream:
        stream.write('{"step": 3, "time": 4.0')
    Follower(path, run).pump()
    assert history() == [(0, 0.0), (1, 1.0), (2, 2.0)]

    with path.open("a") as stream:
        stream.write(', "loss": 3.0}\n')
    second = Follower(path, run)
    second.pump()
    assert second.points == 1, "only the new line is sent"
    assert history() == [(s, float(s)) for s in range(4)]

    # a kill between sending and noting the offset: everything is sent again, and stored once
    tracking.client.set_tag(run.run_id, OFFSET_TAG, "0:0")
    third = Follower(path, run)
    third.pump()
    assert third.points == 4
    assert history() == [(s, float(s)) for s in range(4)]

    # a resumed trainer rewrites the file without the steps that it repeats, and goes on
    kept = "".join(path.read_text().splitlines(keepends=True)[:3])
    (tmp_path / "partial").write_text(kept + json.dumps({"step": 3, "time": 99.0, "loss": 3.0}) + "\n")
    (tmp_path / "partial").replace(path)
    third.pump()
    assert [step for step, _ in history()] == [0, 1, 2, 3, 3], "a step done twice has two times; no other is doubled"


def test_a_long_file_is_sent_in_batches(tracking: Tracking, run: StageRun, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": s, "time": 1.0, "a": s, "b": -s}) + "\n" for s in range(1200)))
    with follow_metrics(path, run) as follower:
        pass
    assert follower.points == 2400
    assert len(tracking.client.get_metric_history(run.run_id, "a")) == 1200


def test_broken_lines_are_skipped_and_counted(tracking: Tracking, run: StageRun, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"loss": 1}\nnonsense\n[]\n\n{"step": 1, "loss": 2.0}\n')
    follower = Follower(path, run)
    follower.pump()
    assert follower.skipped == 3
    assert tracking.client.get_run(run.run_id).data.metrics == {"loss": 2.0}


def test_parameters_keep_long_values_whole_and_secrets_out(
    tracking: Tracking, run: StageRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BACKEND_PASSWORD", "correct horse battery")
    run.params(
        {
            "training": {"epochs": 4, "betas": [0.9, 0.99]},
            "long": "x" * 7000,
            "api_key": "abcdef",
            "pad_token": "<pad>",
            "url": "https://user:hunter22@host/x",
            "note": "uses correct horse battery",
        }
    )
    found = tracking.client.get_run(run.run_id).data.params
    assert found == {
        "training.epochs": "4",
        "training.betas": "[0.9, 0.99]",
        "long": "see artifact params/long.json",
        "api_key": "[redacted]",
        "pad_token": "<pad>",
        "url": "https://[redacted]@host/x",
        "note": "uses [redacted]",
    }
    assert json.loads((artifacts(run, tracking) / "params" / "long.json").read_text()) == "x" * 7000


def test_inputs_carry_whole_digests(tracking: Tracking, run: StageRun) -> None:
    digest = "".join(f"{n:x}" for n in range(16)) * 4
    run.inputs([DatasetFacts(name="states", digest=digest, context="training", uri="store/states", kind="states")])
    (found,) = tracking.client.get_run(run.run_id).inputs.dataset_inputs
    assert found.dataset.name == "states"
    assert found.dataset.digest == digest[:36], "MLflow's column is 36 wide"
    assert {tag.key: tag.value for tag in found.tags} == {"mlflow.data.context": "training", "digest": digest}


def test_files_behind_links_are_uploaded_and_conversations_are_not(
    tracking: Tracking, run: StageRun, tmp_path: Path
) -> None:
    source = tmp_path / "output"
    (source / "0").mkdir(parents=True)
    (source / "0" / "model.safetensors").write_bytes(b"\x00weights")
    (source / "best").symlink_to("0")
    (source / "report.json").write_text(json.dumps({"al": 1.5, "worst": [{"id": "a", "text": "my secret diary"}]}))
    conversation = {"messages": [{"role": "user", "content": "my secret diary"}]}
    (source / "rows.jsonl").write_text(json.dumps(conversation) + "\n")
    run.files(source, "output")
    stored = artifacts(run, tracking) / "output"
    assert (stored / "best" / "model.safetensors").read_bytes() == b"\x00weights"
    assert not (stored / "best").is_symlink()
    assert json.loads((stored / "report.json").read_text())["al"] == 1.5
    for path in stored.rglob("*.json*"):
        assert "diary" not in path.read_text(), path

    tracking.handle(run.run_id, allow_text=True).files(source / "report.json", "allowed")
    assert "diary" in (artifacts(run, tracking) / "allowed" / "report.json").read_text()


def test_a_link_in_a_circle_is_named(run: StageRun, tmp_path: Path) -> None:
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "again").symlink_to(".")
    with pytest.raises(RegistryError, match="circle"):
        run.files(tmp_path / "output")


def test_an_absent_mlflow_is_reported_soon(tmp_path: Path) -> None:
    environ = {
        **child_environment(tmp_path),
        "MLFLOW_TRACKING_URI": "http://127.0.0.1:9",
    }
    code = (
        "from tasks.adapters.settings import settings\nsettings()\n"
        "from tasks.adapters.tracking import Tracking\nTracking(settings())"
    )
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60)
    assert "RegistryError: MLflow at http://127.0.0.1:9 failed to open its store" in done.stderr
    assert "mend: check that MLFLOW_TRACKING_URI is right" in done.stderr
    assert time.monotonic() - started < 30


def test_training_goes_on_when_mlflow_goes_away(
    tracking: Tracking, run: StageRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n')
    follower = Follower(path, run)
    tracking.client.delete_run(run.run_id)  # MLflow refuses to write to it
    with follow_metrics(path, run, interval_s=0.05):
        time.sleep(0.2)
    assert sum("metrics wait in" in message for message in caplog.messages) == 2, "once while away, once at the end"
    tracking.client.restore_run(run.run_id)
    follower.pump()
    assert tracking.client.get_run(run.run_id).data.metrics == {"loss": 2.0}, "nothing is lost"
