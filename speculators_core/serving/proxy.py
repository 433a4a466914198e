"""The proxy that clients talk to: HAProxy, whose servers we move over its runtime API.

Why HAProxy: the state of a server (ready, drained, its address) changes over a unix socket at once, with no reload and
no second worker; a drained server gets no new request while those in flight, streams included, run to their end; it
counts requests and failures of each server apart; Debian and every registry have it as a package of two megabytes.
nginx changes its upstreams by a reload only and counts nothing by upstream; vllm-router balances many engines and would
bring a stack of its own for the one that we have.

Every request gets a connection of its own to the engine (`http-server-close`): an idle one that the engine closes at
the moment of reuse would be a failed request. A request that finds no engine waits for nothing: it is told 503 and
when to come again.
"""

from __future__ import annotations

import csv
import io
import logging
import os
import shutil
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from speculators_core.engine.server import read_tail
from speculators_core.errors import ConfigError, EngineError
from speculators_core.processes import SupervisedProcess, supervise
from speculators_core.serving.traffic import ProxyCounts

log = logging.getLogger(__name__)

SLOTS = ("a", "b", "c")
"""Places for engines: the one that serves, the displaced one that stands by, and one that is still drained."""
_SOCKET, _LOG = "haproxy.sock", "haproxy.log"
_ANSWER_S = 5.0
_START_S = 15.0
_AWAY = '{"error": {"message": "no engine serves at the moment; try again", "type": "unavailable", "code": 503}}'


class ProxyGone(EngineError):
    """HAProxy has ended, and with it all that was in flight."""


def render_config(host: str, port: int, *, request_timeout_s: float) -> str:
    """HAProxy's configuration: one front, places for engines, and the runtime socket in the working directory.

    Only what clients need is let through: the OpenAI-compatible API, tokenisation, version and health.
    """
    silence = f"{round(request_timeout_s * 1000)}ms"
    places = "\n".join(f"    server {name} 127.0.0.1:1 disabled" for name in SLOTS)
    return f"""\
global
    stats socket unix@{_SOCKET} mode 600 level admin
    maxconn 4000
    no strict-limits

defaults
    mode http
    option http-server-close
    option http-no-delay
    option redispatch
    retries 3
    timeout connect 5s
    timeout client {silence}
    timeout server {silence}

frontend clients
    bind {host}:{port}
    http-request deny unless {{ path_beg /v1/ }} or {{ path /health /version /tokenize /detokenize }}
    default_backend engines

backend engines
    http-error status 503 content-type application/json string '{_AWAY}' hdr Retry-After 5
{places}
"""


def find_haproxy() -> str:
    """Path of the program. ConfigError, with the mend, where there is none."""
    found = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin:/usr/local/sbin")
    if found is None:
        raise ConfigError(
            "`serve` puts HAProxy before the engines, and there is no `haproxy` on this machine",
            mend="apt-get install haproxy (a package called haproxy in most distributions)",
        )
    return found


def require_free_port(host: str, port: int) -> None:
    """ConfigError where somebody listens there already, or the address is none of this machine's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"{host}:{port} cannot be listened on: {error.strerror}",
                mend="free it, or choose another with --set serve.port=… (serve.host: the address)",
            ) from error


class Proxy:
    """A running HAProxy. Dies with us; `stop` cuts what is in flight, so drain first."""

    def __init__(self, directory: Path, home: Path, host: str, port: int, *, request_timeout_s: float) -> None:
        """Start it, with no engine yet. Raises ConfigError, EngineError: no program, port taken, it does not come up.

        Args:
            directory: its configuration, socket and log · home: state root, for the pid file.
        """
        program = find_haproxy()
        require_free_port(host, port)
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        (directory / "haproxy.cfg").write_text(render_config(host, port, request_timeout_s=request_timeout_s))
        for left in (_SOCKET, _LOG):
            (directory / left).unlink(missing_ok=True)
        self._process: SupervisedProcess = supervise(
            [program, "-db", "-f", "haproxy.cfg"],
            name="haproxy",
            home=home,
            log=directory / _LOG,
            cwd=directory,
        )
        try:
            self._await_start()
        except BaseException:
            self._process.stop()
            raise

    def _await_start(self) -> None:
        deadline = time.monotonic() + _START_S
        while True:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise EngineError(
                    f"HAProxy did not come up:\n{read_tail(self._process.log)[-1000:]}",
                    mend="look whether the port is free and the configuration right",
                )
            try:
                self.command("show info")
                return
            except ProxyGone:
                time.sleep(0.05)

    def alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    def stop(self) -> None:
        """End it."""
        self._process.stop(grace_s=1)

    def command(self, line: str) -> str:
        """One command of the runtime API and its answer. ProxyGone; EngineError where it hangs."""
        # a socket's path may have 107 bytes: the directory is reached through a descriptor
        directory = os.open(self._directory, os.O_PATH | os.O_DIRECTORY)
        try:
            with socket.socket(socket.AF_UNIX) as channel:
                channel.settimeout(_ANSWER_S)
                channel.connect(f"/proc/self/fd/{directory}/{_SOCKET}")
                channel.sendall(line.encode() + b"\n")
                answer = b""
                while received := channel.recv(1 << 16):
                    answer += received
        except TimeoutError:
            raise EngineError(f"HAProxy has not answered {line!r} within {_ANSWER_S:g} s") from None
        except OSError as error:
            raise ProxyGone(f"HAProxy is gone: {error.strerror}") from error
        finally:
            os.close(directory)
        if not answer.endswith(b"\n"):
            raise ProxyGone(f"HAProxy ended before it had answered {line!r}")
        return answer.decode()

    def _order(self, line: str) -> None:
        if answer := self.command(line).strip():
            raise EngineError(f"HAProxy refused {line!r}: {answer}")

    def open(self, slot: str, base_url: str) -> None:
        """Send new requests to the engine at this address, in this place."""
        address = urlsplit(base_url)
        moved = self.command(f"set server engines/{slot} addr {address.hostname} port {address.port}")
        log.debug("%s", moved.strip())
        self._order(f"set server engines/{slot} state ready")

    def drain(self, slot: str) -> None:
        """Send it no new request; those in flight go on."""
        self._order(f"set server engines/{slot} state drain")

    def close(self, slot: str) -> None:
        """Take the place out of service; with a proxy that is gone it is."""
        with suppress(ProxyGone):
            self._order(f"set server engines/{slot} state maint")

    def refuse_clients(self) -> None:
        """Take no new connection; requests in flight go on."""
        self._order("disable frontend clients")

    def in_flight(self, slot: str) -> int:
        """Requests that the engine in this place is answering; none are left of a proxy that is gone."""
        try:
            return int(self._stats()[slot]["scur"])
        except ProxyGone:
            return 0

    def counts(self, slot: str) -> ProxyCounts:
        """Totals of this place since the proxy's start; a failed request may count twice as an error, never not."""
        row = self._stats()[slot]
        number = {name: int(row[name] or 0) for name in (*_ANSWERED, "eresp", "srv_abrt")}
        return ProxyCounts(
            requests=sum(number[name] for name in _ANSWERED),
            errors=number["hrsp_5xx"] + number["eresp"] + number["srv_abrt"],
        )

    def _stats(self) -> Mapping[str, Mapping[str, str]]:
        lines = self.command("show stat").removeprefix("# ")
        return {row["svname"]: row for row in csv.DictReader(io.StringIO(lines)) if row["pxname"] == "engines"}


_ANSWERED = ("hrsp_1xx", "hrsp_2xx", "hrsp_3xx", "hrsp_4xx", "hrsp_5xx", "hrsp_other")
