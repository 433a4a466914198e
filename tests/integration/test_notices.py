"""Messages reach a real web server: one an incident, again later where it was away, and never with the address."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tasks import notices
from tasks.adapters.settings import read_settings
from tasks.events import DraftPromoted, GateRefused

SECRET = "hook-to-be-kept-secret"


class Receiver:
    """A web server that keeps what is posted to it, and can refuse."""

    def __init__(self) -> None:
        self.status = 200
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: object) -> None: ...

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if receiver.status == 200:
                    receiver.bodies.append(json.loads(body))
                    receiver.paths.append(self.path)
                self.send_response(receiver.status)
                self.end_headers()

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"json://127.0.0.1:{self.server.server_address[1]}/{SECRET}"


@pytest.fixture
def receiver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    found = Receiver()
    thread = threading.Thread(target=found.server.serve_forever, daemon=True)
    thread.start()
    site = tmp_path / "site.yaml"
    channels = [{"url_variable": "ONCALL"}, {"url_variable": "QUIET", "events": ["traffic.drifted"]}]
    site.write_text(json.dumps({"watch": {"recipes": ["x"]}, "notify": channels}))
    known = read_settings({"DRAFTSMITH_HOME": str(tmp_path / "home"), "DRAFTSMITH_SITE": str(site)})
    monkeypatch.setattr(notices, "settings", lambda: known)
    for name in ("ONCALL", "QUIET"):
        monkeypatch.setenv(name, found.address)
    monkeypatch.setenv("NO_PROXY", "*")
    yield found
    found.server.shutdown()
    found.server.server_close()
    thread.join()


def refused(**changes: Any) -> GateRefused:
    about = {"deployment": "chat", "version": "7", "outcome": "fail", "reasons": ("AL 1.2", "lossy")}
    return GateRefused.model_validate({**about, **changes})


def test_one_message_an_incident_on_the_channels_that_want_it(receiver: Receiver) -> None:
    for _ in range(3):
        refused().emit("version 7")
    refused(version="8").emit("version 8")
    DraftPromoted(deployment="chat", version="8", displaced="7", reasons=("by name",)).emit("move 1")
    titles = [body["title"] for body in receiver.bodies]
    assert titles == [
        "chat: gate.refused (version 7)",
        "chat: gate.refused (version 8)",
        "chat: draft.promoted (version 8)",
    ], "once each: the quiet channel wants none of these"
    assert receiver.bodies[0]["message"] == "AL 1.2\nlossy" and receiver.paths[0] == f"/{SECRET}"


def test_what_nobody_took_is_sent_later_and_the_address_stays_secret(
    receiver: Receiver, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    receiver.status = 500
    refused().emit("version 7")
    monkeypatch.delenv("ONCALL")
    notices.deliver()
    assert receiver.bodies == [] and "ONCALL did not take" in caplog.text and "ONCALL is not set" in caplog.text
    monkeypatch.setenv("ONCALL", receiver.address)
    receiver.status = 200
    notices.deliver()
    notices.deliver()
    assert len(receiver.bodies) == 1
    kept = "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file() and path.name != "site.yaml")
    assert SECRET not in caplog.text and SECRET not in kept and '"sent":["ONCALL"]' in kept


def test_secrets_in_what_is_told_are_masked(receiver: Receiver) -> None:
    refused(reasons=("cannot read https://me:pass-word@host/x",)).emit("a")
    assert "pass-word" not in receiver.bodies[0]["message"] and "[redacted]" in receiver.bodies[0]["message"]


def test_a_broken_site_file_stops_nothing(receiver: Receiver, caplog: pytest.LogCaptureFixture) -> None:
    notices.settings().site.write_text("notify: [{url: https://host/token}]")
    refused().emit("version 7")
    assert receiver.bodies == [] and "nobody is told of anything" in caplog.text
