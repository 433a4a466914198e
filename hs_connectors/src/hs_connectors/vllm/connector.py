"""The KV connector: hidden states of finished requests, from the engine's cache to a backend.

vLLM makes two of these. The *scheduler* half decides, when a request ends, which tokens are captured, and
answers with a handle. The *worker* half copies their states out of the cache, lets the engine have the
blocks back, and leaves packing and writing to threads. Nothing here waits for a disk.

    request ends ─ scheduler: handle into the response ─ next step ─ worker: copy ─ threads: pack, write
                                                                              └ blocks freed

Prefix caching and chunked prefill need no care: the states live in cache blocks of their own group,
which vLLM fills, shares and evicts together with the keys and values of the same tokens.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch

from hs_connectors.contract import NORM_POINT, SETTINGS_KEY, CaptureSettings, Handle, Record, safe_key
from hs_connectors.registry import open_backend, open_writer
from hs_connectors.spool import Spool
from hs_connectors.vllm import compat
from hs_connectors.vllm.compat import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorPromMetrics,
    KVConnectorRole,
    KVConnectorStats,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from hs_connectors.vllm.metrics import CaptureMetrics, CaptureStats, StatsSource
from hs_connectors.vllm.plugin import refuse_shadowing
from hs_connectors.vllm.staging import Copy, Stager, run_anywhere

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Capture:
    """One record to write: what the scheduler half tells the worker half."""

    request_id: str
    key: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    blocks: tuple[int, ...]


@dataclass
class CaptureMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """From scheduler to worker, every step."""

    captures: list[Capture] = field(default_factory=list)


@dataclass
class StoreState(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """From worker to scheduler, when it changes: why the store takes nothing, or None."""

    trouble: str | None

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """One rank writes; a trouble is not lost to a rank that has none."""
        return self if self.trouble is not None or not isinstance(other, StoreState) else other


class DraftsmithHiddenStates(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Store-only connector for the speculative method `extract_hidden_states`.

    Raises SettingsError or StorageError while the engine starts, when it could only fail later.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        refuse_shadowing()
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._settings = CaptureSettings.from_json(extra.get(SETTINGS_KEY))
        compat.refuse_unsupported(vllm_config, self._settings.layer_ids)
        self._config = vllm_config
        self._group, self._block_size = compat.hidden_states_group(kv_cache_config)
        self._half = _SchedulerHalf(self._settings, self._group, self._block_size)
        self._worker: _WorkerHalf | None = None

    # -- worker half ---------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Open the store and announce the engine, on the one rank that writes."""
        cache = compat.cache_layer(self._config, kv_caches)
        if cache is None or compat.tensor_parallel_rank() != 0:
            return
        assert cache.shape[2] == self._block_size, "vLLM's cache view and its group's block size disagree"
        self._worker = _WorkerHalf(self._settings, Stager(cache), compat.engine_facts(self._config))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Start copies of requests that ended; report those whose blocks may be reused."""
        if self._worker is None:
            return None, None
        captures: list[Capture] = []
        if self.has_connector_metadata():
            metadata = self._get_connector_metadata()
            assert isinstance(metadata, CaptureMetadata)
            captures, metadata.captures = metadata.captures, []
        return self._worker.advance(captures) or None, None

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Tell the scheduler half when the store stops or starts taking records."""
        return self._worker.news() if self._worker is not None else None

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """What the writers have done since the last step, for the log and for `/metrics`."""
        return self._worker.stats() if self._worker is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        """The stats again, from what travelled to the server's process."""
        return CaptureStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> KVConnectorPromMetrics:
        """Their counters and gauges on the server's `/metrics`."""
        return CaptureMetrics(*args)

    def get_finished_count(self) -> int | None:
        """One rank reports each request."""
        return 1

    def shutdown(self) -> None:
        """Write out what is queued; what cannot be written ends as an error marker."""
        with _signals_ignored():
            if self._worker is not None:
                self._worker.close()
            self._half.close()

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: this connector only stores."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: this connector only stores."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: states are read from the cache once, when their request has ended."""

    def wait_for_save(self) -> None:
        """Nothing: blocks stay reserved until `get_finished` reports their copy as done."""

    # -- scheduler half ------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """None: nothing is ever loaded."""
        return 0, False

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        """Nothing: nothing is ever loaded."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Hand over the captures that were decided since the last step."""
        return CaptureMetadata(self._half.take())

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Learn from the worker half whether the store takes records."""
        news = connector_output.kv_connector_worker_meta
        if isinstance(news, StoreState):
            self._half.trouble = news.trouble

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished_all_groups`, for an engine with one cache group."""
        return self._half.decide(request, block_ids)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Decide what of a finished request is captured; the dictionary goes into its response."""
        return self._half.decide(request, block_ids[self._group] if self._group < len(block_ids) else [])


@contextmanager
def _signals_ignored() -> Iterator[None]:
    """For the time of a shutdown: vLLM gives signals their default action before it, and its server sends another."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _SchedulerHalf:
    """Turns finished requests into captures and response parameters."""

    def __init__(self, settings: CaptureSettings, group: int, block_size: int) -> None:
        self._settings = settings
        self._block_size = block_size
        self._decided: list[Capture] = []
        self.trouble: str | None = None

    def decide(self, request: Request, blocks: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """(keep the blocks until copied, what the response says: a handle, or an error)."""
        if not compat.ended_normally(request):
            return False, None  # aborted or failed: nobody waits for its states
        refusal, token_ids = self._tokens(request, len(blocks))
        if refusal is not None:
            log.error("not captured request=%s cause=%s", request.request_id, refusal)
            return False, {"error": refusal}
        key = f"{safe_key(request.request_id)}-{secrets.token_hex(8)}"
        num_blocks = -(-len(token_ids) // self._block_size)
        self._decided.append(
            Capture(request.request_id, key, token_ids, request.num_prompt_tokens, tuple(blocks[:num_blocks]))
        )
        return True, {"handle": Handle(self._settings.backend, key).to_json()}

    def take(self) -> list[Capture]:
        """The captures decided since the last call."""
        decided, self._decided = self._decided, []
        return decided

    def close(self) -> None:
        """Fail what was promised in a response and never reached the worker."""
        if not (captures := self.take()):
            return
        backend = open_backend(self._settings.backend, self._settings.backend_config)
        for capture in captures:
            backend.fail(capture.key, "the engine stopped before the states were copied")

    def _tokens(self, request: Request, num_blocks: int) -> tuple[str | None, tuple[int, ...]]:
        """Why not, or the token ids whose states are in the cache."""
        if self.trouble is not None:
            return f"the store of hidden states takes no records: {self.trouble}", ()
        if request.prompt_token_ids is None:
            return "the request has embeddings in place of token ids", ()
        include = (request.kv_transfer_params or {}).get("include_output_tokens", False)
        if not isinstance(include, bool):
            return f"include_output_tokens must be true or false, got {include!r}", ()
        # The last token that was generated never went into the verifier: it has no state.
        token_ids = tuple(request.all_token_ids)[:-1] if include else tuple(request.prompt_token_ids)
        held = min(request.num_computed_tokens, num_blocks * self._block_size)
        if held < len(token_ids):
            return f"the cache holds states of {held} of {len(token_ids)} tokens", ()
        return None, token_ids


class _WorkerHalf:
    """Copies captures out of the cache and spools them to the backend.

    A capture that finds no room waits in its cache blocks. The engine may have nothing to do by the time there is room,
    and takes no step then: so a writer thread that made room starts the next copies itself.
    """

    def __init__(self, settings: CaptureSettings, stager: Stager, engine: dict[str, Any]) -> None:
        self._settings = settings
        self._stager = stager
        self._dtype = str(stager.dtype).removeprefix("torch.")
        self._lock = threading.Lock()  # of the three below
        self._waiting: deque[Capture] = deque()
        self._copying: dict[str, Copy] = {}
        self._released: set[str] = set()
        self._told: str | None = None
        self._stats = StatsSource()
        writer = open_writer(settings.backend, settings.backend_config, settings.codec)
        writer.announce(engine | self._facts())
        self._spool = Spool(
            writer,
            threads=settings.writer_threads,
            max_bytes=settings.queue_bytes,
            on_thread_start=run_anywhere if engine["device"] == "cpu" else None,
            on_room=self._start_waiting,
        )
        log.info("capturing layers=%s dtype=%s backend=%s", settings.layer_ids, self._dtype, settings.backend)

    def advance(self, captures: list[Capture]) -> set[str]:
        """Start the copies that there is room for; ids of requests whose blocks are free now."""
        with self._lock:
            self._waiting.extend(captures)
        self._start_waiting()
        with self._lock:
            for request_id in [name for name, copy in self._copying.items() if copy.done()]:
                del self._copying[request_id]
                self._released.add(request_id)
            released, self._released = self._released, set()
        return released

    def _start_waiting(self) -> None:
        with self._lock:
            while self._waiting and self._spool.has_room(self._stager.num_bytes(len(self._waiting[0].token_ids))):
                self._start(self._waiting.popleft())

    def stats(self) -> CaptureStats | None:
        """What changed since the last call; None where nothing did."""
        return self._stats.since_last(self._spool.state(), len(self._waiting))

    def news(self) -> StoreState | None:
        """The store's state, when it differs from what was told last."""
        trouble = self._spool.trouble
        if trouble == self._told:
            return None
        self._told = trouble
        return StoreState(trouble)

    def close(self) -> None:
        """Copy what still waits, then drain the writers, both within `drain_timeout_s`."""
        deadline = time.monotonic() + self._settings.drain_timeout_s
        while self._waiting and time.monotonic() < deadline:
            self.advance([])
            time.sleep(0.005)
        with self._lock:
            given_up, self._waiting = self._waiting, deque()
        for capture in given_up:
            self._spool.fail(capture.key, "the engine stopped before the states were copied")
        late = self._spool.close(max(0.0, deadline - time.monotonic()))
        if late:
            log.error("records given up at shutdown count=%d", len(late))

    def _start(self, capture: Capture) -> None:
        try:
            copy = self._stager.copy(capture.blocks, len(capture.token_ids))
        except Exception as error:  # such as no memory for the copy: this record fails, the engine lives
            log.exception("states could not be copied out of the cache key=%s", capture.key)
            self._spool.fail(capture.key, f"the states could not be copied out of the cache: {error}")
            self._released.add(capture.request_id)
            return
        self._copying[capture.request_id] = copy
        self._spool.submit(
            capture.key, self._stager.num_bytes(len(capture.token_ids)), partial(self._record, capture, copy)
        )

    def _record(self, capture: Capture, copy: Copy) -> Record:
        copy.wait()
        return Record(
            hidden_states=copy.states,
            token_ids=torch.tensor(capture.token_ids, dtype=torch.int64),
            layer_ids=self._settings.layer_ids,
            dtype=self._dtype,
            verifier_fingerprint=self._settings.verifier_fingerprint,
            extra={"request_id": capture.request_id, "prompt_tokens": str(capture.num_prompt_tokens)},
        )

    def _facts(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "connector": version("draftsmith-hs-connectors"),
            "layer_ids": list(self._settings.layer_ids),
            "norm_point": NORM_POINT,
            "states_dtype": self._dtype,
            "codec": self._settings.codec,
            "verifier_fingerprint": self._settings.verifier_fingerprint,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started_at": time.time(),
        }
