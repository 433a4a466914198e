"""Capture of the verifier's hidden states: by vLLM, or by a Hugging Face forward, into one kind of set.

Both sources pass the same gates and write the same shards; the set says which it was. A capture that was killed goes on
after its last finished shard.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pydantic import Field

from hs_connectors.contract import CPU_SCHEDULER, CaptureSettings, Reader, kv_transfer_config, speculative_config
from hs_connectors.errors import SettingsError
from hs_connectors.registry import open_reader
from speculators_core.engine.config import NO_PREFIX_CACHING
from speculators_core.engine.runtime import Runtime, probe_runtime
from speculators_core.engine.server import Engine, ServerSpec, serve
from speculators_core.errors import CaptureError, ConfigError, DiskSpaceError
from speculators_core.states.collect import WHOLE, Collector, Rows, Share, content_of, each, ids_of
from speculators_core.states.config import CaptureConfig
from speculators_core.states.gates import check_layers, check_source, check_states
from speculators_core.states.handshake import at_store, check_announcement, server_command, shake_hands, terms_of
from speculators_core.states.parity import ParityGate, ParityReport
from speculators_core.states.sets import StateSet
from speculators_core.states.shards import StatesFacts
from speculators_core.states.source import Tally, request_states
from speculators_core.states.stores import provided_store
from speculators_core.store import storage_errors
from speculators_core.types import ProgressCallback, StrictModel
from speculators_core.verifier.facts import VerifierFacts, read_facts

RECORDS_NAME = ".records"
SHARE_NAME = ".share-{}"
"""Where the engine of a part works, below the workspace of the whole."""
_CPU_STEP = 1024
"""Tokens in an engine step on a CPU: the activations of more fall out of its caches."""
_IN_FLIGHT = 4
"""Requests that the client keeps ahead, as a multiple of the concurrency."""


class CaptureReport(StrictModel):
    """What a capture did; all but the last five fields describe the whole set."""

    source: str = Field(description="engine or hf")
    layer_ids: tuple[int, ...] = Field(description="captured layers")
    dtype: str = Field(description="dtype of the states")
    rows: int = Field(description="rows of the set")
    tokens: int = Field(description="tokens of the set")
    shards: int = Field(description="shards of the set")
    num_bytes: int = Field(description="bytes of the set's states")
    parity: ParityReport | None = Field(
        description="comparison with an independent forward; null where none was asked for"
    )
    captured_rows: int = Field(description="rows captured in this run")
    captured_tokens: int = Field(description="tokens captured in this run")
    reused_shards: int = Field(description="shards that an earlier, cut-off run had finished")
    retried_rows: int = Field(description="captures that had to be repeated")
    seconds: float = Field(description="time of the requests in this run, engine start and parity not included")

    @property
    def tokens_per_second(self) -> float:
        """Captured tokens per second of this run; 0 when nothing was left to capture."""
        return self.captured_tokens / self.seconds if self.seconds and self.captured_tokens else 0.0


def estimate_bytes(rows: Rows, facts: VerifierFacts, layer_ids: Sequence[int], dtype: str) -> int:
    """Bytes of the finished set: tokens × (K · H · bytes of the dtype + ids and mask)."""
    tokens = sum(int(row.input_ids.shape[0]) for row in each(rows))
    return tokens * bytes_per_token(facts, layer_ids, dtype)


def require_disk(path: Path, num_bytes: int, *, lower: str = "take fewer rows (data.max_rows)") -> None:
    """Refuse to start what will not fit; `lower` is what the user can do beside getting more room.

    Raises:
        DiskSpaceError: with the need, what is free, and the cures.
    """
    free = free_bytes(path)
    if num_bytes > free:
        raise DiskSpaceError(
            f"the hidden states need {_gib(num_bytes)}, and {_gib(free)} are free at {path}",
            mend=f"free space, point DRAFTSMITH_HOME at a larger disk, or {lower}",
        )


def free_bytes(path: Path) -> int:
    """Free space where a path lies, or will."""
    return shutil.disk_usage(_existing(path)).free


def same_disk(one: Path, other: Path) -> bool:
    """Whether what goes from one place makes room in the other."""
    return _existing(one).stat().st_dev == _existing(other).stat().st_dev


def _existing(path: Path) -> Path:
    found = path.absolute()
    while not found.exists():
        found = found.parent
    return found


def records_config(config: CaptureConfig, workspace: Path) -> dict[str, Any]:
    """Where records travel: the recipe's own backend settings, else a directory in the workspace."""
    if config.backend_config or config.backend != "file":
        return dict(config.backend_config)
    # Records live for seconds and are captured again after a crash: waiting for the disk would only cost time.
    return {"root": str(workspace.absolute() / RECORDS_NAME), "fsync": False}


def capture_server(
    config: CaptureConfig,
    verifier_dir: Path,
    layer_ids: Sequence[int],
    fingerprint: str,
    workspace: Path,
    *,
    max_model_len: int | None = None,
    device: str = "cpu",
    trust_remote_code: bool = False,
) -> ServerSpec:
    """The server that `capture` talks to.

    Args:
        workspace: where the records go unless the backend is configured.
        device: the runtime's; decides the size of a step where the configuration leaves it open.

    Raises:
        ConfigError: the layer ids or the backend's settings are wrong.
    """
    try:
        settings = CaptureSettings(
            backend=config.backend,
            backend_config=records_config(config, workspace),
            layer_ids=tuple(layer_ids),
            verifier_fingerprint=fingerprint,
            codec=config.codec,
        )
    except SettingsError as error:
        raise ConfigError(error.what, mend=error.mend) from error
    return ServerSpec(
        model=str(verifier_dir),
        dtype=config.dtype,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens or (_CPU_STEP if device == "cpu" else None),
        kv_cache_gib=config.kv_cache_gib,
        speculative=speculative_config(settings),
        kv_transfer=kv_transfer_config(settings),
        trust_remote_code=trust_remote_code,
        extra_args=(
            *(() if config.prefix_caching else (NO_PREFIX_CACHING,)),
            *(("--scheduler-cls", CPU_SCHEDULER) if device == "cpu" else ()),
        ),
    )


def capture_rows(
    rows: Rows,
    runtime: Runtime | None,
    layer_ids: Sequence[int],
    fingerprint: str,
    config: CaptureConfig,
    workspace: Path,
    *,
    verifier_dir: Path,
    home: Path,
    trust_remote_code: bool = False,
    check: Callable[[Engine], None] | None = None,
    progress: ProgressCallback | None = None,
) -> CaptureReport:
    """Capture all rows into `workspace`, by the source that the configuration names; starts the engine only if needed.

    Args:
        rows: token rows, e.g. a prepared data set.
        runtime: the vLLM to use; unused by source "hf".
        layer_ids: ascending; the last is the number of layers.
        fingerprint: digest of the verifier.
        workspace: survives kills; becomes the set.
        home: state root for the engine's logs and pid files.
        check: called with the engine before the first row; what it raises ends the capture.

    Raises:
        ConfigError, DataError, DiskSpaceError: before anything expensive.
        CaptureError: a gate failed, or the engine died; finished shards are kept.
    """
    facts = read_facts(verifier_dir)
    layers = check_layers(layer_ids, facts.num_hidden_layers)
    if config.source == "engine":
        config = at_store(config, runtime)
    collector = plan_capture(rows, facts, layers, fingerprint, config, workspace)
    if config.source == "hf":
        return _capture_hf(rows, collector, config, workspace, verifier_dir, trust_remote_code, progress)
    length, spec = context_for(collector.longest, facts), None
    with ExitStack() as held:
        if collector.missing():
            if runtime is None:
                raise ConfigError("a capture by the engine needs a runtime")
            info, per_token = probe_runtime(runtime, home=home), collector.facts.bytes_per_token
            config = held.enter_context(provided_store(config, collector.longest, per_token, home))
            spec = capture_server(
                config,
                verifier_dir,
                layers,
                fingerprint,
                workspace,
                max_model_len=length,
                device=info.device,
                trust_remote_code=trust_remote_code,
            )
            if runtime.url is not None:
                shake_hands(runtime, terms_of(collector, config), server_command(spec, runtime.url))
        pool = held.enter_context(ThreadPoolExecutor(1, thread_name_prefix="parity"))
        # The reference forward runs while the engine starts, which mostly waits for imports.
        gate = ParityGate(rows, collector, config, verifier_dir, facts, trust_remote_code)
        prepared = pool.submit(gate.prepare)
        if runtime is None or spec is None:
            prepared.result()
            return conclude(collector, gate, workspace, Tally())
        with serve(runtime, spec, home=home) as engine:
            if check is not None:
                check(engine)
            prepared.result()
            tally = request_states(rows, collector, gate, engine, config, _reader(config, workspace), progress)
        return conclude(collector, gate, workspace, tally)


def capture(
    rows: Rows,
    engine: Engine,
    layer_ids: Sequence[int],
    fingerprint: str,
    config: CaptureConfig,
    workspace: Path,
    *,
    verifier_dir: Path,
    progress: ProgressCallback | None = None,
) -> CaptureReport:
    """Capture all rows through an engine that runs already (see `capture_server`).

    Raises:
        ConfigError, DataError, DiskSpaceError: before the first request.
        CaptureError: a gate failed, or the engine died; finished shards are kept.
    """
    facts = read_facts(verifier_dir)
    layers = check_layers(layer_ids, facts.num_hidden_layers)
    collector = plan_capture(rows, facts, layers, fingerprint, config, workspace)
    context_for(collector.longest, facts)
    reader = _reader(config, workspace)
    check_announcement(reader, terms_of(collector, config), engine)
    gate = ParityGate(rows, collector, config, verifier_dir, facts, False)
    gate.prepare()
    tally = request_states(rows, collector, gate, engine, config, reader, progress)
    return conclude(collector, gate, workspace, tally)


def plan_share(
    rows: Rows,
    verifier_dir: Path,
    layer_ids: Sequence[int],
    fingerprint: str,
    config: CaptureConfig,
    workspace: Path,
    share: Share,
) -> Collector:
    """Plan or resume one engine's part of a capture. Raises as `plan_capture`."""
    facts = read_facts(verifier_dir)
    layers = check_layers(layer_ids, facts.num_hidden_layers)
    return plan_capture(rows, facts, layers, fingerprint, config, workspace, share)


def plan_capture(
    rows: Rows,
    facts: VerifierFacts,
    layers: tuple[int, ...],
    fingerprint: str,
    config: CaptureConfig,
    workspace: Path,
    share: Share = WHOLE,
    *,
    freed: int = 0,
) -> Collector:
    """Plan or resume a capture, and refuse at once what will not fit on the disk.

    Args:
        freed: bytes on the same disk that go as rows are written.

    Raises:
        ConfigError, DataError, DiskSpaceError, StoreError.
    """
    check_source(config.source, facts)
    states = StatesFacts(
        layer_ids=layers,
        hidden_size=facts.hidden_size,
        dtype=config.dtype,
        verifier_fingerprint=fingerprint,
        source=config.source,
    )
    with storage_errors(workspace, "preparing a capture"):
        workspace.mkdir(parents=True, exist_ok=True)
    collector = Collector(rows, states, workspace, config.shard_tokens, share)
    missing = collector.missing_tokens()
    in_flight = min(missing, _IN_FLIGHT * config.concurrency * collector.longest)  # records that lie beside the set
    require_disk(workspace, int((missing + in_flight) * states.bytes_per_token * 1.02) - freed)
    return collector


def context_for(longest: int, facts: VerifierFacts) -> int:
    """The context that the longest row needs (one token is generated after it, one more is speculated on).

    Raises:
        CaptureError: it is longer than the verifier's.
    """
    needed = longest + 1
    if needed > facts.max_position_embeddings:
        raise CaptureError(
            f"the longest row has {longest} tokens, and the verifier's context holds "
            f"{facts.max_position_embeddings}, one of which is generated",
            mend=f"set data.max_length to at most {facts.max_position_embeddings - 1}",
        )
    return min(needed + 8, facts.max_position_embeddings)


def _reader(config: CaptureConfig, workspace: Path) -> Reader:
    try:
        return open_reader(config.backend, records_config(config, workspace))
    except SettingsError as error:
        raise ConfigError(f"capture.backend: {error.what}", mend=error.mend) from error


def _capture_hf(
    rows: Rows,
    collector: Collector,
    config: CaptureConfig,
    workspace: Path,
    verifier_dir: Path,
    trust_remote_code: bool,
    progress: ProgressCallback | None,
) -> CaptureReport:
    from speculators_core.states.hf import HiddenStateForward

    tally, missing = Tally(), collector.missing()
    layers = collector.facts.layer_ids
    if missing:
        forward = HiddenStateForward(verifier_dir, layers, config.dtype, trust_remote_code=trust_remote_code)
        started = time.monotonic()
        for position in missing:
            row = rows.row(position)
            ids = ids_of(row)
            states = forward(ids)
            check_states(states, f"row {row.index}", layers, varied=bool((ids != ids[0]).any()))
            collector.add(content_of(row, states))
            tally.rows += 1
            tally.tokens += ids.shape[0]
            if progress is not None:
                progress(tally.rows, len(missing))
        tally.seconds = time.monotonic() - started
    return conclude(collector, None, workspace, tally)


def conclude(collector: Collector, gate: ParityGate | None, workspace: Path, tally: Tally) -> CaptureReport:
    """The last gate, then the index that makes the directory a set."""
    parity = None
    if gate is not None and not collector.missing():
        parity = gate.conclude(StateSet(workspace, collector.draft_index({})))
    facts = collector.facts
    report = CaptureReport(
        source=facts.source,
        layer_ids=facts.layer_ids,
        dtype=facts.dtype,
        rows=collector.num_rows,
        tokens=collector.num_tokens,
        shards=collector.num_shards,
        num_bytes=collector.num_tokens * facts.bytes_per_token,
        parity=parity,
        captured_rows=tally.rows,
        captured_tokens=tally.tokens,
        reused_shards=collector.reused_shards,
        retried_rows=tally.retried,
        seconds=tally.seconds,
    )
    # Only what is the same however often the capture was cut off: equal states give an equal set.
    lasting = report.model_dump(mode="json", include={"parity"})
    collector.finish(lasting)
    for leftover in (RECORDS_NAME, SHARE_NAME.format("*")):
        for path in workspace.glob(leftover):
            shutil.rmtree(path, ignore_errors=True)
    return report


def bytes_per_token(facts: VerifierFacts, layer_ids: Sequence[int], dtype: str) -> int:
    """Bytes of a token's states, id and mask in a set."""
    return StatesFacts(
        layer_ids=tuple(layer_ids), hidden_size=facts.hidden_size, dtype=dtype, verifier_fingerprint="", source=""
    ).bytes_per_token


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB"
