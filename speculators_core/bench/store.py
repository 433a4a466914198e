"""How fast records go through a store: put and get of large ones, beside what the medium does with the same bytes.

Rules: one thread, one process, so that it is the work of one record that is measured; both sides in turn on the same
place; one unmeasured round each; medians. A put is all that the engine's writer does (check, encode, pack, checksum,
publish), a get all that a reader does before it has tensors. `file` and `s3` have a raw side: plain writes and reads of
files, plain puts and gets of s3fs.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from hs_connectors.contract import Handle, Record
from hs_connectors.registry import open_reader, open_writer
from speculators_core.states.config import CaptureConfig
from speculators_core.states.stores import provided_store, store_at
from speculators_core.types import StrictModel

LAYERS, HIDDEN = (2, 15, 27, 30), 2048
_KEY = "draftsmith-bench"
_TIMEOUT_S = 60.0
_GIGA = 1e9

Round = tuple[float, float]
"""Seconds of a put, seconds of a get."""


class StoreSpeed(StrictModel):
    """One store."""

    place: str = Field(description="its address")
    codec: str = Field(description="how states were encoded")
    num_bytes: int = Field(description="states of one record in bfloat16, bytes")
    put_gb_s: float = Field(description="GB of states put in a second, median")
    get_gb_s: float = Field(description="GB of states got in a second, median")
    raw_put_gb_s: float | None = Field(description="the same bytes put plainly; null where there is no plainer way")
    raw_get_gb_s: float | None = Field(description="the same bytes got plainly")
    ratio: float | None = Field(description="time of raw put and get / time of put and get; the goal is at least 0.8")

    def line(self) -> str:
        """For a terminal."""
        raw = (
            "" if self.ratio is None else f"  raw {self.raw_put_gb_s:.2f} / {self.raw_get_gb_s:.2f}: {self.ratio:.2f} ×"
        )
        return f"{self.place} ({self.codec}): put {self.put_gb_s:.2f} GB/s, get {self.get_gb_s:.2f} GB/s{raw}"


def bench_store(place: str, home: Path, *, codec: str = "none", mib: int = 16, rounds: int = 10) -> StoreSpeed:
    """Put and get one record after the other at a place such as `/records` or `s3://BUCKET/PREFIX`.

    Args:
        place: an address; or `shm` or `mooncake` alone, for a store that is made for this.
        home: state root, for logs and pid files of such a store.
        mib: states of a record, MiB.
        rounds: measured puts and gets of each side.

    Raises:
        ConnectorError: the address or the codec is unknown, or the store refuses.
        CaptureError: the store does not start.
    """
    record = _make_record(mib)
    num_bytes, tokens = record.hidden_states.nbytes, len(record.token_ids)
    asked = store_at(CaptureConfig(concurrency=1), place)
    mine, plain = [], []
    with provided_store(asked, tokens, -(-num_bytes // tokens), home) as config:
        name, settings = config.backend, config.backend_config
        ours = _through_store(name, settings, codec, record)
        raw = _RAW[name](settings, record) if name in _RAW else None
        with _one_thread():
            for number in range(rounds + 1):
                mine.append(ours(number))
                if raw is not None:
                    plain.append(raw(number))
    put, get = _medians(mine[1:])
    raw_put, raw_get = _medians(plain[1:]) if plain else (None, None)
    return StoreSpeed(
        place=place,
        codec=codec,
        num_bytes=num_bytes,
        put_gb_s=num_bytes / put / _GIGA,
        get_gb_s=num_bytes / get / _GIGA,
        raw_put_gb_s=None if raw_put is None else num_bytes / raw_put / _GIGA,
        raw_get_gb_s=None if raw_get is None else num_bytes / raw_get / _GIGA,
        ratio=None if raw_put is None or raw_get is None else (raw_put + raw_get) / (put + get),
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """torch computes in the calling thread alone: on a busy machine a second one is waited for longer than it helps."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _make_record(mib: int) -> Record:
    tokens = (mib << 20) // (len(LAYERS) * HIDDEN * 2)
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(tokens, len(LAYERS), HIDDEN, generator=generator).bfloat16()
    return Record(states, torch.arange(tokens), LAYERS, "bfloat16", "bench")


def _through_store(name: str, config: Mapping[str, Any], codec: str, record: Record) -> Callable[[int], Round]:
    writer, reader = open_writer(name, config, codec), open_reader(name, config)

    def once(number: int) -> Round:
        started = time.perf_counter()
        handle: Handle = writer.put(f"{_KEY}-{number}", record)
        between = time.perf_counter()
        got = reader.get(handle, _TIMEOUT_S)
        ended = time.perf_counter()
        assert codec != "none" or torch.equal(got.hidden_states, record.hidden_states)
        reader.delete(handle)
        return between - started, ended - between

    return once


def _through_files(config: Mapping[str, Any], record: Record) -> Callable[[int], Round]:
    path = Path(str(config["root"])) / f".{_KEY}"
    content = record.hidden_states.view(torch.uint8).numpy().tobytes()

    def once(_number: int) -> Round:
        started = time.perf_counter()
        with path.open("wb", buffering=0) as file:
            file.write(content)
            if config.get("fsync", True):
                os.fsync(file.fileno())
        between = time.perf_counter()
        assert len(path.read_bytes()) == len(content)
        ended = time.perf_counter()
        path.unlink()
        return between - started, ended - between

    return once


def _through_s3fs(config: Mapping[str, Any], record: Record) -> Callable[[int], Round]:
    import s3fs

    files = s3fs.S3FileSystem(endpoint_url=config.get("endpoint_url"), use_listings_cache=False)
    path = f"{config['root']}/{_KEY}.raw"
    content = record.hidden_states.view(torch.uint8).numpy().tobytes()

    def once(_number: int) -> Round:
        started = time.perf_counter()
        files.pipe_file(path, content)
        between = time.perf_counter()
        assert len(files.cat_file(path)) == len(content)
        ended = time.perf_counter()
        files.rm_file(path)
        return between - started, ended - between

    return once


_RAW: Mapping[str, Callable[[Mapping[str, Any], Record], Callable[[int], Round]]] = {
    "file": _through_files,
    "s3": _through_s3fs,
}


def _medians(rounds: Sequence[Round]) -> Round:
    return statistics.median(put for put, _ in rounds), statistics.median(get for _, get in rounds)
