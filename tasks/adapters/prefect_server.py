"""Prefect's API for one command: a server that somebody runs, or a private one that cannot outlive us.

Prefect's own ephemeral mode starts its server inside the first flow run and leaves it behind when the flow is killed.
Ours is the same server and database, supervised, on a port of its own; and it boots (about 4 s of imports) while the
command is still importing torch and MLflow.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from speculators_core.errors import ConfigError, DraftsmithError
from speculators_core.processes import OWNER_VARIABLE, SupervisedProcess, supervise
from tasks.adapters.redaction import redact
from tasks.adapters.settings import Settings

log = logging.getLogger(__name__)

STARTUP_TIMEOUT_S = 180.0
UI_RECORD = "ui.json"


@dataclass(frozen=True)
class PrefectApi:
    """Where Prefect's API is, or will soon be."""

    url: str
    process: SupervisedProcess | None

    def wait(self, timeout_s: float = STARTUP_TIMEOUT_S) -> None:
        """Return when the server answers; call it just before the first flow.

        Raises:
            DraftsmithError: our own server died or didn't come up in time.
            ConfigError: the configured server doesn't answer.
        """
        deadline = time.monotonic() + (timeout_s if self.process is not None else 20)
        while not answers(f"{self.url}/health"):
            if self.process is None:
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"no Prefect server answers at {redact(self.url)}",
                        mend="start it, or unset PREFECT_API_URL to use a private one",
                    )
            elif (status := self.process.poll()) is not None or time.monotonic() > deadline:
                tail = "".join(self.process.log.read_text(errors="replace").splitlines(keepends=True)[-15:])
                cause = "didn't come up in time" if status is None else f"ended with status {status}"
                raise DraftsmithError(f"Prefect's private server {cause}; end of {self.process.log}:\n{tail}")
            time.sleep(0.05)


@contextmanager
def prefect_api(settings: Settings) -> Iterator[PrefectApi]:
    """Provide PREFECT_API_URL for the duration of a command.

    In this order: the server that PREFECT_API_URL names; the one that `make ui` runs over the same state root; a
    private one, which is started in the background (see `PrefectApi.wait`) and ends with us however we end.
    """
    existing = settings.prefect_api_url or running_ui_api(settings.home)
    if existing is not None:
        with _api_url(existing):
            yield PrefectApi(existing, None)
        return
    port = free_port()
    url = f"http://127.0.0.1:{port}/api"
    process = supervise(
        [
            *(sys.executable, "-m", "uvicorn", "--factory", "prefect.server.api.server:create_app"),
            *("--host", "127.0.0.1", "--port", str(port), "--log-level", "error", "--lifespan", "on"),
        ],
        name="prefect-server",
        home=settings.home,
        log=settings.home / "logs" / "prefect-server.log",
        env={
            "PREFECT_HOME": str(settings.prefect_home),
            "PREFECT_UI_ENABLED": "0",  # saves the copy of its static files
            "PREFECT__SERVER_EPHEMERAL": "1",  # only the services that record runs: no scheduler, no late runs
            "PREFECT__SERVER_FINAL": "1",
            "PREFECT_API_URL": None,
            OWNER_VARIABLE: None,
        },
    )
    with process, _api_url(url):
        try:
            yield PrefectApi(url, process)
        finally:
            _flush_prefect()


def _flush_prefect() -> None:
    """Send queued log lines and events while the server is still there; later they only cause noise and delay."""
    if "prefect.main" not in sys.modules:
        return
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    EventsWorker.drain_all(timeout=5)
    APILogWorker.drain_all(timeout=5)


def running_ui_api(home: Path) -> str | None:
    """API of the Prefect server that `make ui` has left word of, when it still answers."""
    try:
        url = str(json.loads((home / UI_RECORD).read_text())["prefect_api"])
    except (FileNotFoundError, ValueError, KeyError):
        return None
    return url if answers(f"{url}/health") else None


def answers(url: str) -> bool:
    """Whether a GET on loopback or a configured server yields status 200 within two seconds."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{redact(url)!r} is not an http URL", mend="check PREFECT_API_URL")
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _api_url(url: str) -> Iterator[None]:
    """Point Prefect at the server: by environment, and in its settings where it was imported already."""
    before = os.environ.get("PREFECT_API_URL")
    os.environ["PREFECT_API_URL"] = url
    try:
        if "prefect.settings" in sys.modules:
            from prefect.settings import PREFECT_API_URL, temporary_settings

            with temporary_settings({PREFECT_API_URL: url}):
                yield
        else:
            yield
    finally:
        if before is None:
            del os.environ["PREFECT_API_URL"]
        else:
            os.environ["PREFECT_API_URL"] = before
