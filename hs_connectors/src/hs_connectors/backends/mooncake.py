"""Records in the memory of several hosts, through Mooncake's distributed store (the extra `mooncake`).

Configuration: `master` (HOST:PORT of mooncake_master), `admin` (HOST:PORT of its metrics, for listings; default port
9003 of the same host), `space` (name before every key; default "draftsmith"), `protocol` (tcp or rdma), `rdma_devices`
(comma-separated), `metadata_server` (default P2PHANDSHAKE), `local_hostname` (how others reach this host; default
127.0.0.1), `segment_mib` (memory that this process lends; default 0), `buffer_mib` (records under way in this process,
and so the largest one; default 512), `full_timeout_s` (how long a writer waits for readers to make room; default 60).

Records live in what some process lends. A record must outlive its writer, so a process of its own should lend it:

    mooncake_master --rpc_port 50051 --metrics_port 9003
    python -m hs_connectors.backends.mooncake --master 127.0.0.1:50051 --segment-mib 16384

`--with-master` starts the first, on loopback, from the second.
Objects are pinned: nothing is evicted, a full store makes its writers wait. A value is 8 bytes of kind, the time as a
double, the payload's CRC-32 in 8 bytes (both little-endian), then the payload. A master that comes back has forgotten
its objects: their readers time out. An object that is replaced while it is read comes mixed or as zeros: its checksum
tells, and it is read again.
"""

from __future__ import annotations

import argparse
import atexit
import ctypes
import json
import logging
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from mooncake.store import MooncakeDistributedStore, ReplicateConfig

from hs_connectors.backends._waiting import await_payload
from hs_connectors.checksums import crc32_of
from hs_connectors.contract import Entry, Payload, check_key, is_key, size_of
from hs_connectors.errors import CaptureFailed, RecordCorrupt, RecordTimeout, SettingsError, StorageError

log = logging.getLogger(__name__)
_DEFAULTS: Mapping[str, Any] = {
    "master": "",
    "admin": "",
    "space": "draftsmith",
    "protocol": "tcp",
    "rdma_devices": "",
    "metadata_server": "P2PHANDSHAKE",
    "local_hostname": "127.0.0.1",
    "segment_mib": 0,
    "buffer_mib": 512,
    "full_timeout_s": 60.0,
}
_OF_CONNECTION = ("local_hostname", "metadata_server", "segment_mib", "buffer_mib", "protocol", "rdma_devices")
_CONNECTING = threading.Lock()
_ADMIN_PORT = 9003
_PREFIX = struct.Struct("<8sdQ")
_RECORD, _ERROR, _FACTS = _KINDS = b"record  ", b"error   ", b"facts   "
_ENGINE = "engine.json"
_FULL, _TAKEN, _MISSING, _NO_ANSWER = -200, -601, -704, -900
_NAMES = {
    _FULL: "no room in the memory that is lent to it",
    _TAKEN: "another process writes the same all the time",
    -600: "larger than this client's buffer (buffer_mib)",
    -800: "the transfer failed: the process that lends the memory may be gone",
    _NO_ANSWER: "its master does not answer",
}
_PAUSES_S = (0.001, 0.05)
_LISTED_AT_ONCE = 256
_CONNECT_S, _MASTER_S = 5.0, 30.0
_LOOK_S, _TURN_S = 0.5, 10.0
_READINGS = 50


class MooncakeBackend:
    """Publishes by an upsert; connects when it is first used."""

    name: ClassVar[str] = "mooncake"

    def __init__(self, config: Mapping[str, Any]) -> None:
        if set(config) - set(_DEFAULTS) or ":" not in str(config.get("master", "")):
            raise SettingsError(
                f"the mooncake backend takes master (HOST:PORT) and {', '.join(sorted(set(_DEFAULTS) - {'master'}))}, "
                f"got {dict(config)!r}"
            )
        self._config = dict(_DEFAULTS) | dict(config)
        self._space = check_key(str(self._config["space"]))
        self._master = str(self._config["master"])
        self._admin = str(self._config["admin"]) or f"{self._master.rpartition(':')[0]}:{_ADMIN_PORT}"
        self._replicas = ReplicateConfig()
        self._replicas.with_hard_pin = True

    @property
    def _store(self) -> Any:
        with _CONNECTING:
            return _connect(os.getpid(), self._master, *(self._config[name] for name in _OF_CONNECTION))

    def prepare(self) -> None:
        """Connect, and prove that somebody lends memory; the master itself forgets puts that were never finished."""
        probe = f"{self._space}/.{secrets.token_hex(8)}.probe"
        self._put(probe, _FACTS, (b"x",), "cannot be written", time.monotonic())
        self._store.remove(probe, True)

    def publish(self, key: str, *pieces: Payload) -> None:
        """Wait for room, then put."""
        what = f"refused record {check_key(key)} of {size_of(pieces)} bytes"
        self._put(self._name(key), _RECORD, pieces, what, time.monotonic() + self._config["full_timeout_s"])

    def fail(self, key: str, message: str) -> None:
        """Put the message in the record's place."""
        what = f"refused even the error marker of {check_key(key)}"
        self._put(self._name(key), _ERROR, (message.encode(),), what, time.monotonic())

    def fetch(self, key: str, timeout_s: float) -> Payload:
        """Poll for the object, from every millisecond to every 50."""
        name = self._name(check_key(key))

        def look() -> Payload | None:
            found = self._get(name)
            if found is None:
                return None
            kind, content = found
            if kind == _ERROR:
                raise CaptureFailed(f"record {key} in {self._where}: {bytes(content).decode(errors='replace')}")
            return content

        hint = "see the engine's log; is this its master and space? A master that restarts forgets records"
        try:
            return await_payload(look, timeout_s, _PAUSES_S, f"record {key} of {self._where}", hint=hint)
        except RecordTimeout:
            if self._store.is_exist(name) < 0:
                raise self._refused(f"was asked for record {key} for {timeout_s:g} s", _NO_ANSWER) from None
            raise

    def discard(self, key: str) -> None:
        """Remove the object, whoever has read it just now."""
        status = self._store.remove(self._name(check_key(key)), True)
        if status not in (0, _MISSING):
            raise self._refused(f"refused to delete record {key}", status)

    def entries(self) -> Iterator[Entry]:
        """The master's list of keys, then the first bytes of each object, some hundreds at once."""
        prefix = f"{self._space}/"
        try:
            with urllib.request.urlopen(f"http://{self._admin}/get_all_keys", timeout=30) as answer:
                names = answer.read().decode().split("\n")
        except (OSError, ValueError) as error:
            raise StorageError(
                f"the store {self._where} cannot be listed: {error}",
                mend="`admin` is the host and --metrics_port of its mooncake_master",
            ) from error
        names = sorted(name for name in names if name.startswith(prefix) and is_key(name.removeprefix(prefix)))
        for start in range(0, len(names), _LISTED_AT_ONCE):
            some = names[start : start + _LISTED_AT_ONCE]
            for name, (kind, modified_at, _) in zip(some, self._prefixes(some), strict=True):
                size = self._store.get_size(name)
                if size < 0 or kind not in (_RECORD, _ERROR):
                    continue  # deleted meanwhile
                is_record = kind == _RECORD
                yield Entry(
                    name.removeprefix(prefix),
                    "record" if is_record else "error",
                    size - _PREFIX.size if is_record else 0,
                    modified_at,
                )

    def announce(self, facts: Mapping[str, Any]) -> None:
        """Put the facts beside the records."""
        content = json.dumps(facts, sort_keys=True).encode()
        self._put(self._name(_ENGINE), _FACTS, (content,), f"refused {_ENGINE}", time.monotonic())

    def announcement(self) -> dict[str, Any] | None:
        """The facts put last."""
        found = self._get(self._name(_ENGINE))
        if found is None:
            return None
        try:
            return dict(json.loads(bytes(found[1])))
        except (ValueError, TypeError) as error:
            raise StorageError(f"{_ENGINE} of {self._where} is not a JSON object: {error}") from error

    @property
    def _where(self) -> str:
        return f"mooncake {self._master} space {self._space}"

    def _name(self, key: str) -> str:
        return f"{self._space}/{key}"

    def _put(self, name: str, kind: bytes, pieces: Sequence[Payload], what: str, deadline: float) -> None:
        """Upsert; while the store is full try again until the deadline, and a while where another writes the same."""
        checksum, turn = crc32_of(pieces), time.monotonic() + _TURN_S
        while True:
            prefix = _PREFIX.pack(kind, time.time(), checksum)
            status = self._store.upsert_parts(name, prefix, *pieces, config=self._replicas)
            if status == 0:
                return
            if time.monotonic() > {_FULL: deadline, _TAKEN: turn}.get(status, 0.0):
                raise self._refused(what, status)
            time.sleep(_PAUSES_S[1])

    def _get(self, name: str) -> tuple[bytes, memoryview] | None:
        """(kind, content) in memory of our own: the client's buffer is for what is under way."""
        for _ in range(_READINGS):
            found = self._store.get_buffer(name)
            if found is None:
                return None
            value = memoryview(bytearray(found))
            if len(value) >= _PREFIX.size:
                kind, _time, checksum = _PREFIX.unpack_from(value)
                content = value[_PREFIX.size :]
                if kind in _KINDS and crc32_of([content]) == checksum:
                    return kind, content
            time.sleep(_PAUSES_S[0])  # it may be being replaced
        raise RecordCorrupt(
            f"{name} in {self._where} is not what this backend wrote: its checksum differs",
            mend="delete the record, and capture the row again",
        )

    def _prefixes(self, names: Sequence[str]) -> Iterator[tuple[bytes, float, int]]:
        buffer = bytearray(_PREFIX.size * len(names))
        address = ctypes.addressof((ctypes.c_char * len(buffer)).from_buffer(buffer))
        self._store.register_buffer(address, len(buffer))
        try:
            targets = [[_PREFIX.size * number] for number in range(len(names))]
            sources, sizes = [[0]] * len(names), [[_PREFIX.size]] * len(names)
            self._store.get_into_ranges([address], [list(names)], [targets], [sources], [sizes])
        finally:
            self._store.unregister_buffer(address)
        return _PREFIX.iter_unpack(bytes(buffer))

    def _refused(self, what: str, status: int) -> StorageError:
        return _refused(self._where, what, status)


@cache
def _connect(
    _process: int,
    master: str,
    local_hostname: str,
    metadata_server: str,
    segment_mib: int,
    buffer_mib: int,
    protocol: str,
    rdma_devices: str,
) -> Any:
    """The process's one client of a master: it finds a lost master again, but its threads don't survive a fork."""
    host, _, port = master.rpartition(":")
    try:  # the client itself would try for a minute and a half
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except (OSError, ValueError) as error:
        raise _refused(f"mooncake {master}", f"cannot be reached ({error})", _NO_ANSWER) from error
    store = MooncakeDistributedStore()
    status = store.setup(
        local_hostname, metadata_server, segment_mib << 20, buffer_mib << 20, protocol, rdma_devices, master
    )
    if status:
        raise _refused(f"mooncake {master}", "cannot be reached", status)
    atexit.register(store.close)
    return store


def _refused(where: str, what: str, status: int) -> StorageError:
    return StorageError(
        f"the store {where} {what}: {_NAMES.get(status, 'refused')} (status {status})",
        mend="does mooncake_master run there, and a process that lends memory "
        "(python -m hs_connectors.backends.mooncake)? Do readers delete what they have read?",
    )


def master_command(rpc_port: int, metrics_port: int, host: str = "127.0.0.1") -> list[str]:
    """The command that starts the package's mooncake_master."""
    package = find_spec("mooncake")
    assert package is not None and package.origin is not None, "imported above"
    program = str(Path(package.origin).with_name("mooncake_master"))
    ports = ["--rpc_port", str(rpc_port), "--metrics_port", str(metrics_port)]
    return [program, *ports, "--rpc_address", host, "--metrics_host", host]


def main(arguments: Sequence[str] | None = None) -> None:
    """Lend memory to a master until SIGTERM or SIGINT: the home of records that outlives engines and trainers.

    Ends with status 1 where a master that it started itself has ended.
    """
    parser = argparse.ArgumentParser(prog="python -m hs_connectors.backends.mooncake", description=main.__doc__)
    parser.add_argument("--master", required=True, metavar="HOST:PORT")
    parser.add_argument("--segment-mib", type=int, required=True, help="memory to lend, MiB")
    parser.add_argument("--local-hostname", default=_DEFAULTS["local_hostname"], help="how others reach this host")
    parser.add_argument("--protocol", choices=("tcp", "rdma"), default="tcp")
    parser.add_argument("--rdma-devices", default="", help="comma-separated")
    parser.add_argument("--with-master", type=int, metavar="METRICS_PORT", help="start the master too, on 127.0.0.1")
    options = parser.parse_args(arguments)
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    settings = {name: value for name, value in vars(options).items() if name != "with_master"}
    with _own_master(options.master, options.with_master) as lives:
        MooncakeBackend({**settings, "buffer_mib": 16}).prepare()
        log.info("lending %d MiB to %s", options.segment_mib, options.master)
        while not stopped.wait(_LOOK_S):
            if not lives():
                sys.exit("the master has ended")


@contextmanager
def _own_master(address: str, metrics_port: int | None) -> Iterator[Callable[[], bool]]:
    """A master for the length of a `with` block, which begins when it listens; whether it still lives."""
    if metrics_port is None:
        yield lambda: True
        return
    port = int(address.rpartition(":")[2])
    with subprocess.Popen(master_command(port, metrics_port)) as master:
        try:
            deadline = time.monotonic() + _MASTER_S
            while master.poll() is None and time.monotonic() < deadline:
                with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=_CONNECT_S):
                    break
                time.sleep(_PAUSES_S[1])
            yield lambda: master.poll() is None
        finally:
            master.kill()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    main()
