"""Engines that are kept: real processes that answer as a server does, killed and started again; no vLLM is needed."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from speculators_core.engine.remote import RecordStore
from speculators_core.engine.runtime import Runtime, RuntimeInfo
from speculators_core.engine.server import Engine, ServerSpec
from speculators_core.errors import DataError, EngineError
from speculators_core.states.book import AddressBook, BookContent
from speculators_core.states.keeper import Station, keep_engines

INFO = RuntimeInfo(vllm="1", build="b", device="cpu", model_runner="v1", torch="t", transformers="f")
SERVER = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "m"}]}')
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def station(root: Path, behaviour: str | None = None) -> Station:
    """An executable that answers the probe, and serves (or behaves as told) when asked to."""
    root.mkdir(exist_ok=True)
    (root / "server.py").write_text(SERVER)
    path = root / "env" / "bin" / "python"
    path.parent.mkdir(parents=True, exist_ok=True)
    serves = f'exec {sys.executable} -S {root}/server.py "$@"'
    probe = f"if [ \"$1\" = -P ]; then echo 'DRAFTSMITH{INFO.model_dump_json()}'; exit; fi"
    path.write_text(f"#!/bin/sh\n{probe}\n{behaviour or serves}\n")
    path.chmod(0o755)
    return Station(Runtime(python=str(path)), RecordStore(config={"root": str(root)}), ServerSpec(model="m"))


def until(book: AddressBook, condition: Callable[[BookContent], bool]) -> BookContent:
    deadline = time.monotonic() + 60
    while not condition(content := book.read()):
        assert time.monotonic() < deadline, content
        time.sleep(0.05)
    return content


def test_an_engine_that_dies_is_started_again_on_another_port_and_none_is_left_behind(tmp_path: Path) -> None:
    book, engines = AddressBook(tmp_path / "book.json"), list[Engine]()
    with keep_engines([station(tmp_path)], book, home=tmp_path, check=engines.append, restarts=1):
        first = book.read().engines["0"]
        assert first.url == engines[0].base_url and first.store is not None
        assert engines[0].process is not None
        os.killpg(engines[0].process.group, signal.SIGKILL)
        second = until(book, lambda content: content.engines.get("0") not in (None, first)).engines["0"]
        assert second.url != first.url and len(engines) == 2
        assert engines[1].process is not None
        os.killpg(engines[1].process.group, signal.SIGKILL)
        lost = until(book, lambda content: bool(content.lost))
        assert lost.hopeless is not None and "died (status 137)" in lost.hopeless and not lost.engines
    assert list((tmp_path / "engines").iterdir()) == []


def test_engines_end_with_the_block_however_it_ends(tmp_path: Path) -> None:
    engines = list[Engine]()
    book = AddressBook(tmp_path / "book.json")
    with (
        pytest.raises(KeyError),
        keep_engines([station(tmp_path)] * 2, book, home=tmp_path, check=engines.append, restarts=1),
    ):
        assert len(book.read().engines) == 2
        raise KeyError
    assert [engine.process.poll() is not None for engine in engines if engine.process] == [True, True]
    assert list((tmp_path / "engines").iterdir()) == []


def test_who_waits_for_an_engine_that_says_nothing_can_be_stopped(tmp_path: Path) -> None:
    """As by a signal, which interrupts the wait wherever it stands."""
    book = AddressBook(tmp_path / "book.json")
    silent = station(tmp_path, f"touch {tmp_path}/started; exec sleep 300")
    ended = threading.Event()

    def signal_us() -> None:
        while not (tmp_path / "started").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)
        assert ended.wait(10), "it acts late"

    with ThreadPoolExecutor(1) as pool:
        signalled = pool.submit(signal_us)
        with (
            pytest.raises(KeyboardInterrupt),
            keep_engines([silent] * 2, book, home=tmp_path, check=lambda engine: None, restarts=3),
        ):
            pytest.fail("the block was entered")
        ended.set()
        signalled.result()
    assert list((tmp_path / "engines").iterdir()) == []


def test_what_does_not_start_or_fails_its_check_is_told_before_the_block(tmp_path: Path) -> None:
    book = AddressBook(tmp_path / "book.json")

    def refuse(engine: Engine) -> None:
        raise DataError("the engine renders other token ids than we do")

    for wrong, check, error in (
        (station(tmp_path / "a", "exit 7"), lambda engine: None, EngineError),
        (station(tmp_path / "b"), refuse, DataError),
    ):
        with pytest.raises(error), keep_engines([wrong], book, home=tmp_path, check=check, restarts=3):
            pytest.fail("the block was entered")
    assert list((tmp_path / "engines").iterdir()) == []
