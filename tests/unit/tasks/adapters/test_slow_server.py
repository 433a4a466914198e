"""What answers at MLflow's address, but not as a server of MLflow does: in drops, or nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from speculators_core.errors import RegistryError
from speculators_core.locks import named_lock
from tasks.adapters import registry_view
from tasks.adapters.deadline import within
from tasks.adapters.settings import Settings, read_settings
from tasks.adapters.tracking import Tracking


@contextmanager
def server(home: Path, *, body: bytes = b"{}", drop_s: float = 0.0, until: threading.Event) -> Iterator[Settings]:
    """Settings with the address of a server that gives this answer, with a pause before each of its bytes."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            for byte in body:
                until.wait(drop_s)
                self.wfile.write(bytes([byte]))

        def log_message(self, *_: object) -> None:
            pass

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    try:
        uri = f"http://127.0.0.1:{running.server_port}"
        yield read_settings({"DRAFTSMITH_HOME": str(home), "MLFLOW_TRACKING_URI": uri})
    finally:
        until.set()
        running.shutdown()
        running.server_close()


def test_a_server_that_drips_is_given_up_and_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("MAX_RETRIES", "0"), ("TIMEOUT", "1")):
        monkeypatch.setenv(f"MLFLOW_HTTP_REQUEST_{name}", value)
    monkeypatch.setattr(registry_view, "_LIMIT_S", 1.0)
    with server(tmp_path, body=b" " * 60, drop_s=0.5, until=threading.Event()) as settings:
        started = time.monotonic()
        with pytest.raises(RegistryError, match="no whole answer within 1 s"):
            Tracking(settings)
        with pytest.raises(RegistryError, match="failed to show chat: no whole answer within 1 s"):
            registry_view.look(settings, "chat")
        assert time.monotonic() - started < 10
        assert not list(settings.locks.glob("*")), "no lock is held while a server is asked"


def test_what_does_not_speak_as_mlflow_is_called_so(tmp_path: Path) -> None:
    with server(tmp_path, until=threading.Event()) as settings:
        with pytest.raises(RegistryError, match="does not speak as MLflow does"):
            Tracking(settings)
        with pytest.raises(RegistryError, match="it does not answer as MLflow does"):
            registry_view.look(settings, "chat")


def test_a_store_that_is_being_opened_holds_up_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.adapters.tracking.named_lock", lambda *where, **how: named_lock(*where, timeout_s=0.1))
    one, other = (
        read_settings({"DRAFTSMITH_HOME": str(tmp_path), "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/{name}.db"})
        for name in ("one", "other")
    )
    Tracking(one)
    (lock,) = one.locks.glob("*")
    with named_lock(one.locks, lock.stem):
        Tracking(other)
        with pytest.raises(RegistryError, match="has held"):
            Tracking(one)


def test_a_call_in_time_gives_its_result_and_its_error() -> None:
    assert within(5, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        within(5, lambda: 1 / 0)
