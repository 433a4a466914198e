"""The store of our own engines where the recipe leaves it open: made on this host, and gone with its users."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from hs_connectors.errors import ConnectorError, SettingsError
from hs_connectors.registry import BACKENDS, locate, open_backend
from speculators_core.errors import CaptureError, ConfigError
from speculators_core.processes import supervise
from speculators_core.states.config import CaptureConfig

log = logging.getLogger(__name__)

_LEAST_BYTES = 256 << 20
_START_S = 60.0
_SHARED = Path("/dev/shm")
_OWNER = ".owner"
"""In a space of shared memory: the lock of the run that made it, which dies with it. Spaces without it are others'."""


@contextmanager
def provided_store(
    config: CaptureConfig, longest: int, bytes_per_token: int, home: Path, engines: int = 1
) -> Iterator[CaptureConfig]:
    """The capture's settings, of which `backend_config` names a store that exists for the length of a `with` block.

    `mooncake` without settings gets a master and a process that lends it memory, on loopback; `shm` a space of its own.
    It has as much room as `room_of` says; a fuller store makes its writers wait. All else stays as it is.

    Args:
        longest: tokens of that row.
        bytes_per_token: of its states.
        home: state root, for logs and pid files.
        engines: how many write to it.

    Raises:
        CaptureError: the store does not start.
    """
    num_bytes = room_of(config, longest, bytes_per_token, engines)
    if not num_bytes:
        yield config
        return
    with _PROVIDERS[config.backend](num_bytes, home) as settings:
        yield config.model_copy(update={"backend_config": dict(settings)})


def store_at(config: CaptureConfig, place: str) -> CaptureConfig:
    """The capture's settings with records through another store.

    Args:
        place: an address as `hs_connectors.registry.locate` reads it, or a backend's name alone, which leaves it open.

    Raises:
        ConnectorError: it is neither.
    """
    backend, settings = (place, {}) if place in BACKENDS else locate(place)
    return config.model_copy(update={"backend": backend, "backend_config": settings})


def check_store(config: CaptureConfig) -> str:
    """What the recipe's store is, having asked it once for its records where the run does not make it.

    Raises:
        ConfigError: its settings are wrong, or what it needs is not installed.
        CaptureError: it does not answer, or lets us not in.
    """
    if config.source != "engine" or (config.runtime is not None and config.runtime.url is not None):
        return "none of our own"
    if not config.backend_config and config.backend in ("file", *_PROVIDERS):
        return f"{config.backend}, made by the run"
    once = {"attempts": 1} if config.backend == "s3" else {}
    try:
        next(iter(open_backend(config.backend, {**config.backend_config, **once}).entries()), None)
    except SettingsError as error:
        raise ConfigError(f"capture.backend_config: {error.what}", mend=error.mend) from error
    except ConnectorError as error:
        raise CaptureError(error.what, mend=error.mend) from error
    return f"{config.backend} answers"


def room_of(config: CaptureConfig, longest: int, bytes_per_token: int, engines: int = 1) -> int:
    """Bytes of this host's memory that `provided_store` lends; 0 where it makes none.

    Twice the records of all requests in flight, were each as long as the longest row.
    """
    if config.backend_config or config.backend not in _PROVIDERS:
        return 0
    return max(_LEAST_BYTES, 2 * config.concurrency * engines * longest * bytes_per_token)


@contextmanager
def _shared_memory(num_bytes: int, home: Path) -> Iterator[Mapping[str, Any]]:
    _sweep_spaces()
    space = f"run-{uuid.uuid4().hex}"
    place = _SHARED / f"draftsmith-{space}"
    try:
        place.mkdir(mode=0o700)
        with (place / f"{_OWNER}.new").open("wb") as owner:
            fcntl.flock(owner, fcntl.LOCK_EX)
            Path(owner.name).rename(place / _OWNER)  # locked before anybody sees it
            yield {"space": space, "max_bytes": num_bytes}
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _sweep_spaces() -> None:
    """Give back the memory that killed runs of this user left: those whose owner file nobody holds any more."""
    for owner in _SHARED.glob(f"draftsmith-run-*/{_OWNER}"):
        try:
            with owner.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if owner.parent.lstat().st_uid == os.geteuid():
                    shutil.rmtree(owner.parent)
                    log.info("removed what a killed run left space=%s", owner.parent.name)
        except OSError:
            continue  # its run lives, or another one removes it


@contextmanager
def _mooncake(num_bytes: int, home: Path) -> Iterator[Mapping[str, Any]]:
    port, metrics_port = _free_ports(2)
    master = f"127.0.0.1:{port}"
    command = [sys.executable, "-m", "hs_connectors.backends.mooncake", "--master", master]
    options = ["--segment-mib", str(-(-num_bytes >> 20)), "--with-master", str(metrics_port)]
    text = home / "logs" / f"mooncake-{time.strftime('%Y%m%d-%H%M%S')}-{port}.log"
    with supervise([*command, *options], name="mooncake", home=home, log=text) as process:
        deadline = time.monotonic() + _START_S
        while "lending" not in (told := text.read_text(errors="replace")):
            if process.poll() is not None or time.monotonic() > deadline:
                raise CaptureError(
                    f"Mooncake's store did not start: {told[-1000:]}\n  log: {text}",
                    mend="install draftsmith-hs-connectors[mooncake] and Debian's libibverbs1 and librdmacm1, or use "
                    "capture.backend file or shm",
                )
            time.sleep(0.1)
        log.info("mooncake's master is at %s, log=%s", master, text)
        yield {"master": master, "admin": f"127.0.0.1:{metrics_port}"}


def _free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


_PROVIDERS: Mapping[str, Callable[[int, Path], AbstractContextManager[Mapping[str, Any]]]] = {
    "mooncake": _mooncake,
    "shm": _shared_memory,
}
