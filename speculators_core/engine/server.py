"""Start a vLLM server, know when it is ready, say why when it dies, and stop it for certain."""

from __future__ import annotations

import logging
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from speculators_core.engine.client import EngineClient
from speculators_core.engine.config import ServerSpec, build_arguments, build_environment
from speculators_core.engine.diagnose import Diagnosis, diagnose
from speculators_core.engine.runtime import Runtime, RuntimeInfo, probe_runtime
from speculators_core.errors import EngineError, EngineTimeout
from speculators_core.processes import SupervisedProcess, supervise
from speculators_core.types import Json

__all__ = ["Engine", "ServerSpec", "build_arguments", "serve"]

_log = logging.getLogger(__name__)
_POLL_S = 0.1
_PORT_ATTEMPTS = 3
_LOG_BYTES = 200_000
_NAME = "vllm"


@dataclass(frozen=True)
class Engine:
    """A server that answers. `process` is None for a remote one; `log` is then a path that does not exist."""

    base_url: str
    model_name: str
    info: RuntimeInfo
    log: Path
    process: SupervisedProcess | None
    api_key: str | None = None

    def check(self) -> None:
        """Raise EngineError, with the likely cause, when the server's process has ended."""
        if self.process is not None and (status := self.process.poll()) is not None:
            raise _death("died", status, self.log)

    def client(self, *, timeout_s: float = 120) -> EngineClient:
        """A client that notices at once when this server dies."""
        return EngineClient(self.base_url, timeout_s=timeout_s, check=self.check, api_key=self.api_key)


@contextmanager
def serve(
    runtime: Runtime,
    spec: ServerSpec,
    *,
    home: Path,
    startup_timeout_s: float = 300,
    while_starting: Callable[[], None] | None = None,
) -> Iterator[Engine]:
    """Run a server for the length of a `with` block; it is gone afterwards, and when we are killed.

    Logs and pid files lie under `home`. `while_starting` is called every few moments until it is ready; what that
    raises gives the start up. A runtime given by URL is only checked: it must answer, and `spec.model` is then what its
    owner says. Raises EngineError when it dies before it is ready, EngineTimeout when it takes longer than
    `startup_timeout_s`.
    """
    info = probe_runtime(runtime, home=home)
    if runtime.url is not None:
        yield _connect(runtime.url, info, home, runtime.api_key())
        return
    for model in (spec.model, (spec.speculative or {}).get("model")):
        _require_model(model)
    engine, process = _start(runtime, spec, info, home, startup_timeout_s, while_starting)
    try:
        yield engine
    finally:
        process.stop()


def _start(
    runtime: Runtime,
    spec: ServerSpec,
    info: RuntimeInfo,
    home: Path,
    startup_timeout_s: float,
    while_starting: Callable[[], None] | None,
) -> tuple[Engine, SupervisedProcess]:
    """Start on a free port; again on another one when somebody took it between our look and vLLM's bind."""
    assert runtime.python is not None
    started = time.monotonic()
    for attempt in range(1, _PORT_ATTEMPTS + 1):
        port = _free_port()
        log = home / "logs" / f"{_NAME}-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}.log"
        process = supervise(
            [str(Path(runtime.python).expanduser().absolute()), *build_arguments(spec, port)],
            name=_NAME,
            home=home,
            log=log,
            env=build_environment(spec, info),
            cores=spec.cores,
        )
        try:
            name = spec.names[0] if spec.names else spec.model
            engine = Engine(f"http://127.0.0.1:{port}", name, info, log, process)
            diagnosis = _await_ready(engine, started + startup_timeout_s, while_starting)
            if diagnosis is None:
                _log.info("%s is ready after %.1f s at %s", spec.model, time.monotonic() - started, engine.base_url)
                return engine, process
        except BaseException:
            process.stop()
            raise
        process.stop()
        if diagnosis.kind != "port" or attempt == _PORT_ATTEMPTS:
            raise _death("did not start", process.poll(), log, diagnosis)
        _log.warning("port %d was taken meanwhile; trying another", port)
    raise AssertionError("unreachable")


def _require_model(model: Json) -> None:
    """Refuse a path that cannot be a model before vLLM takes half a minute to say so; hub ids pass."""
    if not isinstance(model, str) or not (Path(model).is_absolute() or Path(model).exists()):
        return
    if not (Path(model) / "config.json").is_file():
        raise EngineError(
            f"{model} is not a model directory: there is no config.json in it",
            mend="name a local directory that holds config.json, *.safetensors and the tokenizer's files",
        )


def _await_ready(engine: Engine, deadline: float, while_starting: Callable[[], None] | None) -> Diagnosis | None:
    """Wait for /health; a Diagnosis when the process ended instead."""
    assert engine.process is not None
    with httpx.Client(base_url=engine.base_url, timeout=2, trust_env=False) as http:
        while engine.process.poll() is None:
            if while_starting is not None:
                while_starting()
            if _is_ready(http, engine.model_name):
                return None
            if time.monotonic() > deadline:
                engine.process.stop()
                raise EngineTimeout(
                    f"the server of {engine.model_name} was not ready in time; see {engine.log}\n"
                    + diagnose(read_tail(engine.log)).describe(),
                    mend="raise the start-up timeout, or look whether other work keeps the machine busy",
                )
            time.sleep(_POLL_S)
    return diagnose(read_tail(engine.log))


def _is_ready(http: httpx.Client, model_name: str) -> bool:
    """Healthy, and serving our model: a stranger may have taken the port before vLLM could."""
    try:
        if http.get("/health").status_code != httpx.codes.OK:
            return False
        models = http.get("/v1/models").json()["data"]
    except (httpx.TransportError, ValueError, KeyError, TypeError):
        return False
    return any(model.get("id") == model_name for model in models)


def _connect(url: str, info: RuntimeInfo, home: Path, api_key: str | None) -> Engine:
    base_url = url.rstrip("/")
    with EngineClient(base_url, timeout_s=10, api_key=api_key) as client:
        return Engine(base_url, client.model_name(), info, home / "logs" / "remote.log", None, api_key)


def _death(verb: str, status: int | None, log: Path, diagnosis: Diagnosis | None = None) -> EngineError:
    found = diagnosis or diagnose(read_tail(log))
    if found.kind == "unknown" and status == 137:
        found = Diagnosis("killed", "it was killed (SIGKILL): out of memory?", "free memory", found.error, found.tail)
    return EngineError(f"the vLLM server {verb} (status {status}): {found.describe()}\n  log: {log}", mend=found.mend)


def read_tail(log: Path) -> str:
    """The last part of a log, as much as a diagnosis needs; "" when there is none."""
    if not log.is_file():
        return ""
    with log.open("rb") as stream:
        stream.seek(0, 2)
        stream.seek(max(0, stream.tell() - _LOG_BYTES))
        return stream.read().decode(errors="replace")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
