"""What is special about Mooncake: memory that somebody lends, a master that goes and comes back."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from hs_connectors import Handle, open_backend, open_reader, open_writer
from hs_connectors.errors import RecordTimeout, StorageError
from hs_connectors.spool import Spool
from hs_connectors.testing import assert_same, make_record
from tests.environment import child_environment
from tests.services import MooncakeServer, mooncake_server

SEGMENT_MIB = 64
LARGE = 200_000
"""Tokens of a record of 7.6 MB: eight of them fill the memory that is lent."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeServer]:
    with mooncake_server(tmp_path_factory.mktemp("mooncake"), SEGMENT_MIB) as running:
        yield running


def config_for(server: MooncakeServer, space: str, **options: Any) -> dict[str, Any]:
    return {**server.config, "space": space, **options}


def test_a_record_outlives_its_writer(server: MooncakeServer) -> None:
    config = config_for(server, "outlives")
    code = (
        "import os, signal, sys, json\n"
        "from hs_connectors import open_writer\n"
        "from hs_connectors.testing import make_record\n"
        "open_writer('mooncake', json.loads(sys.argv[1])).put('key', make_record(1000))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, json.dumps(config)], env=child_environment(), check=False)
    assert done.returncode == -signal.SIGKILL
    reader = open_reader("mooncake", config)
    assert_same(reader.get(Handle("mooncake", "key"), 5), make_record(1000))
    reader.delete(Handle("mooncake", "key"))


def test_several_engines_may_start_on_one_store_at_once(server: MooncakeServer) -> None:
    code = (
        "import json, sys\n"
        "from hs_connectors import open_backend\n"
        "backend = open_backend('mooncake', json.loads(sys.argv[1]))\n"
        "backend.announcement()\n"  # connects
        "print('connected', flush=True); sys.stdin.readline()\n"
        "for number in range(100):\n"
        "    backend.prepare(); backend.announce({'number': number})\n"
    )
    config = config_for(server, "together")
    command = [sys.executable, "-c", code, json.dumps(config)]
    piped: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    engines = [subprocess.Popen(command, env=child_environment(), **piped) for _ in range(3)]
    for engine in engines:
        assert engine.stdout is not None and engine.stdout.readline() == "connected\n"
    assert [engine.communicate("go\n", timeout=60) and engine.returncode for engine in engines] == [0, 0, 0]
    backend = open_backend("mooncake", config)
    assert backend.announcement() == {"number": 99}
    assert list(backend.entries()) == []


def test_a_full_store_evicts_nothing_and_makes_its_writer_wait(server: MooncakeServer) -> None:
    config = config_for(server, "full", full_timeout_s=30)
    writer, reader = open_writer("mooncake", config), open_reader("mooncake", config)
    impatient = open_writer("mooncake", {**config, "full_timeout_s": 0})
    record, keys = make_record(LARGE), []
    with pytest.raises(StorageError, match="no room in the memory"):
        for number in range(20):
            keys.append(impatient.put(f"k{number}", record))
    assert len(keys) >= 4
    threading.Timer(0.5, reader.delete, (keys[0],)).start()
    keys.append(writer.put("late", record))
    for handle in keys[1:]:
        assert_same(reader.get(handle, 5), record)
        reader.delete(handle)
    assert list(open_backend("mooncake", config).entries()) == []


def test_a_master_that_goes_and_comes_back(server: MooncakeServer) -> None:
    """Last but one. What it held is forgotten; writers and readers go on with the next record."""
    config = config_for(server, "gone")
    writer, reader = open_writer("mooncake", config), open_reader("mooncake", config)
    spool = Spool(writer, threads=1, max_bytes=1 << 20)
    forgotten = writer.put("before", make_record())
    server.running["master"].stop(grace_s=0)
    spool.submit("meanwhile", 100, make_record)
    deadline = time.monotonic() + 60
    while spool.trouble is None:
        assert time.monotonic() < deadline, "nobody noticed that the master is gone"
        time.sleep(0.1)
    with pytest.raises(StorageError, match="does not answer"):
        reader.get(forgotten, 0)
    server.start_master()
    while spool.trouble is not None:
        assert time.monotonic() < deadline, "nobody noticed that the master is back"
        time.sleep(0.1)
    while True:
        try:
            again = writer.put("after", make_record())
            break
        except StorageError:  # the lender has not come back to it yet
            assert time.monotonic() < deadline
            time.sleep(0.5)
    assert_same(reader.get(again, 5), make_record())
    with pytest.raises(RecordTimeout, match="A master that restarts forgets"):
        reader.get(forgotten, 0)
    assert spool.close(10) == []


def test_no_lender_is_refused_before_the_first_record(server: MooncakeServer) -> None:
    """Last: it ends the lender."""
    server.running["lender"].stop()
    with pytest.raises(StorageError, match=r"cannot be written[\s\S]*a process that lends memory"):
        open_writer("mooncake", config_for(server, "nobody"))
