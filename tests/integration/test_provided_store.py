"""Stores that a run makes for itself: there for as long as the block, with nothing left of them afterwards."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from hs_connectors import Handle, open_reader, open_writer
from hs_connectors.testing import assert_same, make_record
from speculators_core.errors import CaptureError
from speculators_core.states import stores
from speculators_core.states.config import CaptureConfig
from speculators_core.states.stores import provided_store
from tests.environment import child_environment


def test_shared_memory_of_its_own_is_emptied(tmp_path: Path) -> None:
    with provided_store(CaptureConfig(backend="shm"), 100, 1 << 20, tmp_path, engines=2) as config:
        assert config.backend_config["max_bytes"] == 2 * 32 * 2 * 100 << 20
        open_writer("shm", config.backend_config).put("key", make_record(5))
        place = Path("/dev/shm") / f"draftsmith-{config.backend_config['space']}"
        assert place.is_dir()
    assert not place.exists()


KILLED = """
import sys
from pathlib import Path
from speculators_core.states import stores
from speculators_core.states.config import CaptureConfig
stores._SHARED = Path(sys.argv[1])
with stores.provided_store(CaptureConfig(backend="shm"), 100, 100, Path(sys.argv[2])) as config:
    print(config.backend_config["space"], flush=True)
    sys.stdin.read()
"""


def test_memory_of_a_killed_run_is_given_back_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared, home = tmp_path / "shm", tmp_path / "home"
    monkeypatch.setattr(stores, "_SHARED", shared)
    named, being_made = shared / "draftsmith-run-7", shared / "draftsmith-run-0a"
    for place in (named, being_made):
        place.mkdir(parents=True)
        (place / "key.safetensors").write_bytes(b"a record")
    (being_made / ".owner.new").touch()
    command = [sys.executable, "-c", KILLED, str(shared), str(home)]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=child_environment(home)
    )
    with child:
        assert child.stdin is not None and child.stdout is not None
        killed = shared / f"draftsmith-{child.stdout.readline().strip()}"
        (killed / "key.safetensors").write_bytes(b"a record")
        with provided_store(CaptureConfig(backend="shm"), 100, 100, home):
            assert (killed / "key.safetensors").exists(), "its run lives"
            child.kill()
            child.wait()
            assert killed.exists()
            with provided_store(CaptureConfig(backend="shm"), 100, 100, home):
                assert not killed.exists()
                assert len(list(shared.iterdir())) == 4, "two that live, and what is not theirs"
    assert set(shared.iterdir()) == {named, being_made}


def test_a_store_that_is_named_and_one_that_needs_nothing_are_left_alone(tmp_path: Path) -> None:
    for config in (CaptureConfig(), CaptureConfig(backend="mooncake", backend_config={"master": "host:1"})):
        with provided_store(config, 100, 100, tmp_path) as found:
            assert found is config
    assert list(tmp_path.iterdir()) == []


def test_mooncakes_master_and_memory_live_as_long_as_the_block(tmp_path: Path) -> None:
    pytest.importorskip("mooncake.store", exc_type=ImportError)
    with provided_store(CaptureConfig(backend="mooncake"), 100, 100, tmp_path) as config:
        written = make_record(5)
        open_writer("mooncake", config.backend_config).put("key", written)
        assert_same(open_reader("mooncake", config.backend_config).get(Handle("mooncake", "key"), 5), written)
        (file,) = (tmp_path / "engines").iterdir()
        group = json.loads(file.read_text())["group"]
        (master,) = psutil.Process(group).children()
        assert "mooncake_master" in master.name()
    assert not master.is_running() and list((tmp_path / "engines").iterdir()) == []
    for name in ("master", "admin"):
        host, _, port = config.backend_config[name].partition(":")
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((host, int(port)), timeout=5)


def test_a_master_that_does_not_start_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mooncake.store", exc_type=ImportError)
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        taken = [server.getsockname()[1] for server in (first, second)]
        monkeypatch.setattr(stores, "_free_ports", lambda count: taken)
        with (
            pytest.raises(CaptureError, match="did not start"),
            provided_store(CaptureConfig(backend="mooncake"), 100, 100, tmp_path),
        ):
            pytest.fail("the block was entered")
    assert list((tmp_path / "engines").iterdir()) == []
