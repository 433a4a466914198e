"""Prefect's and MLflow's pages over the state root, on loopback, until Ctrl-C.

    python -m infra.ui [--prefect-port 4200] [--mlflow-port 5000]

While it runs, draftsmith's commands report to this Prefect server instead of to a private one, so that their runs show
live. A server that PREFECT_API_URL or an http MLFLOW_TRACKING_URI names is not started again, only named.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NoReturn

from speculators_core.errors import ConfigError, DraftsmithError
from speculators_core.processes import SupervisedProcess, supervise
from speculators_core.types import may_hold_secret
from tasks.adapters.prefect_server import UI_RECORD, answers
from tasks.adapters.redaction import redact
from tasks.adapters.settings import Settings, settings

HOST = "127.0.0.1"
STARTUP_TIMEOUT_S = 180.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve both pages; 0 after Ctrl-C or SIGTERM, 1 when a server cannot start or ends."""
    parser = argparse.ArgumentParser(description="Prefect's and MLflow's pages over the state root")
    parser.add_argument("--prefect-port", type=int, default=4200, help="port of Prefect's page")
    parser.add_argument("--mlflow-port", type=int, default=5000, help="port of MLflow's page")
    options = parser.parse_args(arguments)
    for number in (signal.SIGINT, signal.SIGTERM):  # also where a shell has set them to be ignored
        signal.signal(number, signal.default_int_handler)
    try:
        serve(settings(), options.prefect_port, options.mlflow_port)
    except KeyboardInterrupt:
        say("stopped")
        return 0
    except DraftsmithError as error:
        say(str(error))
        return 1


def serve(found: Settings, prefect_port: int, mlflow_port: int) -> NoReturn:
    """Start both servers, say where they are, and wait until one ends or a signal comes.

    Raises:
        ConfigError: a port is in use.
        DraftsmithError: a server doesn't come up, ends, or doesn't answer from its store.
    """
    with ExitStack() as stack:
        started: list[SupervisedProcess] = []
        prefect_url, mlflow_url = found.prefect_api_url, found.tracking_uri
        if prefect_url is None:
            require_free(prefect_port, "--prefect-port")
            prefect_url = f"http://{HOST}:{prefect_port}/api"
            started.append(stack.enter_context(start_prefect(found, prefect_port)))
        if not mlflow_url.startswith(("http://", "https://")):
            require_free(mlflow_port, "--mlflow-port")
            mlflow_url = f"http://{HOST}:{mlflow_port}"
            started.append(stack.enter_context(start_mlflow(found, mlflow_port)))
        wait(lambda: answers(f"{prefect_url}/health"), started, "Prefect")
        wait(lambda: answers(f"{mlflow_url}/health"), started, "MLflow")
        experiments = mlflow_experiments(mlflow_url)
        if not may_hold_secret(prefect_url):  # else who may use that server has its address from elsewhere
            record = found.home / UI_RECORD
            record.write_text(json.dumps({"prefect_api": prefect_url}))
            stack.callback(record.unlink, missing_ok=True)
        say(f"Prefect  {prefect_url.removesuffix('/api')}")
        say(f"MLflow   {mlflow_url}  ({experiments} experiments)")
        say("Ctrl-C stops both")
        while True:
            wait(lambda: False, started, "the pages", timeout_s=float("inf"))


def start_prefect(found: Settings, port: int) -> SupervisedProcess:
    """Prefect's whole server: pages, scheduler, automations."""
    return supervise(
        [sys.executable, "-m", "prefect", "server", "start", "--host", HOST, "--port", str(port)],
        name="prefect-ui",
        home=found.home,
        log=found.home / "logs" / "prefect-ui.log",
        env={"PREFECT_HOME": str(found.prefect_home), "PREFECT_API_URL": None},
    )


def start_mlflow(found: Settings, port: int) -> SupervisedProcess:
    """MLflow's server over the store; a fresh store is made first, so that its workers don't race for it."""
    from tasks.adapters.tracking import Tracking

    Tracking(found)
    return supervise(
        [
            *(sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(port), "--workers", "1"),
            *("--artifacts-destination", str(found.mlflow_artifacts)),
        ],
        name="mlflow-ui",
        home=found.home,
        log=found.home / "logs" / "mlflow-ui.log",
        env={"MLFLOW_BACKEND_STORE_URI": found.tracking_uri},  # it may hold a password: no part of a command line
    )


def mlflow_experiments(url: str) -> int:
    """Ask MLflow through its API, since its health page answers whatever its store says."""
    request = urllib.request.Request(
        f"{url}/api/2.0/mlflow/experiments/search",
        data=json.dumps({"max_results": 1000}).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return len(json.load(response)["experiments"])
    except (OSError, ValueError, KeyError) as error:
        raise DraftsmithError(f"MLflow at {url} does not answer from its store: {error}") from error


def wait(
    ready: Callable[[], bool],
    processes: Sequence[SupervisedProcess],
    what: str,
    timeout_s: float = STARTUP_TIMEOUT_S,
) -> None:
    """Until it is ready; an error when one of the processes ends or the time is up."""
    deadline = time.monotonic() + timeout_s
    while not ready():
        for process in processes:
            if (status := process.poll()) is not None:
                tail = "\n".join(process.log.read_text(errors="replace").splitlines()[-15:])
                raise DraftsmithError(f"a server ended with status {status}; end of {process.log}:\n{tail}")
        if time.monotonic() > deadline:
            raise DraftsmithError(f"{what} did not answer within {timeout_s:.0f} s", mend="look into its log")
        time.sleep(0.2)


def require_free(port: int, flag: str) -> None:
    """ConfigError when something listens on the port already."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise ConfigError(f"port {port} is in use", mend=f"choose another with {flag}") from error


def say(line: str) -> None:
    """A line for the person at the terminal; addresses come without their passwords."""
    sys.stdout.write(f"{redact(line)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
