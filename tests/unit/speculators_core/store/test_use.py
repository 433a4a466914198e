"""Sweeping beside users: what is read or made stays, what was swept is gone at once, and a kill leaves no half."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from speculators_core.errors import StoreError
from speculators_core.store import Store
from speculators_core.types import ArtifactRef
from tests.environment import child_environment


def publish(store: Store, key: str, files: int = 1) -> ArtifactRef:
    workspace = store.workspace("states", key)
    for number in range(files):
        (workspace / f"{number}.bin").write_bytes(key.encode())
    return store.publish(workspace, "states", key)


def open_store(root: Path) -> Store:
    return Store(str(root / "store"), scratch=root / "scratch")


@pytest.fixture(params=["local", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "store") if request.param == "local" else f"memory://{tmp_path.name}/store"


def test_what_somebody_reads_or_makes_is_not_swept(root: str, tmp_path: Path) -> None:
    def opened() -> Store:
        return Store(root, scratch=tmp_path / "scratch")

    ref = publish(opened(), "one")
    reader, sweeper = opened(), opened()
    reader.path(ref)
    assert sweeper.busy("states", "one") and not sweeper.sweep(ref)
    del reader
    with opened().single_flight("states", "one"):
        assert not sweeper.sweep(ref)
    assert not sweeper.busy("states", "one")
    assert sweeper.sweep(ref)
    assert opened().find("states", "one") is None
    with pytest.raises(StoreError, match="vanished"):
        opened().path(ref)


def test_use_is_noted_and_young_artifacts_are_known_by_it(root: str, tmp_path: Path) -> None:
    store = Store(root, scratch=tmp_path / "scratch")
    ref = publish(store, "one")
    assert abs(store.last_used(ref) - time.time()) < 60
    store.path(ref)
    lock = next((tmp_path).rglob("states-one.use.lock"))
    os.utime(lock, (1e9, 1e9))
    again = Store(root, scratch=tmp_path / "scratch")
    again.path(ref)
    assert lock.stat().st_mtime > 1.5e9


def test_a_workspace_goes_only_when_no_stage_holds_it(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    work = store.workspace("states", "left")
    (work / "shard").write_bytes(b"x")
    assert [(kind, key) for kind, key, _ in store.workspaces()] == [("states", "left")]
    with open_store(tmp_path).single_flight("states", "left"):
        assert not store.sweep_workspace("states", "left")
    assert store.sweep_workspace("states", "left")
    assert list(store.workspaces()) == []


SWEEP = """
import sys
from pathlib import Path
from speculators_core.store import Store
store = Store(sys.argv[1] + "/store", scratch=Path(sys.argv[1]) / "scratch")
print("ready", flush=True)
store.sweep(next(ref for ref in store.artifacts() if ref.uri.endswith("big")))
"""


def test_a_sweep_killed_in_the_middle_leaves_no_half_artifact(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    big, small = publish(store, "big", files=4000), publish(store, "small")
    target, trash = tmp_path / "store" / "states" / "big", tmp_path / "store" / ".work" / ".trash"
    child = subprocess.Popen(
        [sys.executable, "-c", SWEEP, str(tmp_path)], env=child_environment(), stdout=subprocess.PIPE
    )
    deadline = time.monotonic() + 60
    while target.exists():
        assert time.monotonic() < deadline
        time.sleep(0.0002)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    left = sum(1 for file in trash.rglob("*.bin"))
    assert left > 0, "the child was too fast to be caught in the middle"
    assert open_store(tmp_path).find("states", "big") is None
    assert open_store(tmp_path).find("states", "small") == small
    open_store(tmp_path).empty_trash()
    assert list(trash.iterdir()) == []
    assert publish(open_store(tmp_path), "big", files=4000) == big, "it can be made again"


def test_a_download_that_may_still_run_is_no_trash(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    trash = tmp_path / "store" / ".work" / ".trash"
    for name in ("download-1", "grave"):
        (trash / name).mkdir(parents=True)
    store.empty_trash()
    assert [path.name for path in trash.iterdir()] == ["download-1"]
    store.empty_trash(older_than_s=-1)
    assert list(trash.iterdir()) == []


def test_parts_are_made_beside_each_other_and_apart_from_the_whole(tmp_path: Path) -> None:
    def looked() -> None:
        raise InterruptedError("a look ends the wait")

    first, second, whole = (open_store(tmp_path) for _ in range(3))
    first.workspace("states", "parts")
    with first.single_flight("states", "parts", shared=True), second.single_flight("states", "parts", shared=True):
        assert whole.busy("states", "parts") and not whole.sweep_workspace("states", "parts")
        with pytest.raises(InterruptedError), whole.single_flight("states", "parts", look=looked):
            pytest.fail("the whole was made beside its parts")
    with (
        whole.single_flight("states", "parts"),
        pytest.raises(InterruptedError),
        first.single_flight("states", "parts", shared=True, look=looked),
    ):
        pytest.fail("a part was made beside the whole")
    assert whole.sweep_workspace("states", "parts")
