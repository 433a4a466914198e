"""The verifier writes its replies, and the same requests leave its hidden states: one pass instead of two.

    answer           conversations → replies.jsonl, and a record of each reply
    capture_answers  the rows that were prepared of them → a hidden-state set

Records are an economy, not an input: what is gone, or was captured for other layers, is captured again.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hs_connectors.contract import Handle, Reader, Record
from hs_connectors.errors import ConnectorError
from hs_connectors.registry import open_backend, open_reader
from speculators_core.data.check import check_prompts, opening_prompts
from speculators_core.data.config import RegenerationConfig
from speculators_core.data.conversations import Conversation
from speculators_core.data.regenerate import RegeneratedTurn, RegenerationReport, regenerate
from speculators_core.data.template import ChatTemplate
from speculators_core.engine.config import ServerSpec
from speculators_core.engine.runtime import Runtime, probe_runtime
from speculators_core.engine.server import Engine, serve
from speculators_core.errors import CaptureError
from speculators_core.states.capture import (
    CaptureReport,
    bytes_per_token,
    capture_rows,
    capture_server,
    conclude,
    free_bytes,
    plan_capture,
    records_config,
    require_disk,
    same_disk,
)
from speculators_core.states.collect import Row, Rows, content_of, each, ids_of
from speculators_core.states.config import CaptureConfig
from speculators_core.states.gates import check_layers, check_record
from speculators_core.states.kept import RESERVE_BYTES
from speculators_core.states.parity import ParityGate
from speculators_core.states.shards import StatesFacts
from speculators_core.states.source import Tally
from speculators_core.types import ProgressCallback
from speculators_core.verifier.facts import read_facts

log = logging.getLogger(__name__)

REPLIES = "replies.jsonl"
_WRITTEN_S = 10.0
_LOOK_S = 0.2
_PROMPTS = 1000
"""Opening prompts that are rendered to know how long they are on average."""


class RecordsGone(CaptureError):
    """Raised where a row has no record that can be read: it has to be captured by itself."""


def answer(
    conversations: Sequence[Conversation],
    runtime: Runtime,
    layer_ids: Sequence[int],
    fingerprint: str,
    config: CaptureConfig,
    replies: RegenerationConfig,
    output: Path,
    *,
    records: Path | None,
    most_bytes: float = math.inf,
    verifier_dir: Path,
    home: Path,
    template_kwargs: dict[str, Any],
    trust_remote_code: bool = False,
    progress: ProgressCallback | None = None,
) -> RegenerationReport:
    """Serve the verifier and have it answer; with `records`, that directory is where its hidden states are left.

    Args:
        most_bytes: of states that are left; what comes after them, or would fill the disk, is removed as it comes.
        layer_ids: ascending; the last is the number of layers.
        fingerprint: digest of the verifier, template and its kwargs included.
        output: JSON Lines as `regenerate` writes them. Both directories survive a kill: the same call goes on.

    Raises:
        ConfigError, DataError, DiskSpaceError: before the first request.
        EngineError: the engine did not start, or died; what was answered is kept.
    """
    facts, template = read_facts(verifier_dir), ChatTemplate.load(verifier_dir, template_kwargs)
    positions = facts.max_position_embeddings
    context = min(replies.max_context or positions, positions - 1)  # capturing speculates on one token more
    length, promised = min(context + 8, positions), None
    if records is not None:
        layers = check_layers(layer_ids, facts.num_hidden_layers)
        per_token = bytes_per_token(facts, layers, config.dtype)
        most_bytes = _room(most_bytes, records, config, conversations, template, per_token)
        promised = _Promised(most_bytes, per_token, records, config)
        info = probe_runtime(runtime, home=home)
        spec = capture_server(
            _on_disk(config),
            verifier_dir,
            layers,
            fingerprint,
            records,
            max_model_len=length,
            device=info.device,
            trust_remote_code=trust_remote_code,
        )
    else:
        spec = ServerSpec(
            model=str(verifier_dir),
            dtype=config.dtype,
            max_model_len=length,
            kv_cache_gib=config.kv_cache_gib,
            trust_remote_code=trust_remote_code,
        )
    spec = spec.model_copy(update={"max_num_seqs": replies.concurrency})
    settings = replies.model_copy(update={"max_context": context})
    with serve(runtime, spec, home=home) as engine, engine.client() as client:
        check_prompts(conversations, template, client, template_kwargs=template_kwargs).require()
        report = regenerate(
            conversations,
            client,
            template,
            facts,
            settings,
            output,
            capture=records is not None,
            producer=fingerprint,
            progress=progress,
            on_turn=promised.look if promised is not None else None,
        )
        if promised is not None:
            promised.settle(engine.check)
        return report


def capture_answers(
    rows: Rows,
    runtime: Runtime | None,
    layer_ids: Sequence[int],
    fingerprint: str,
    config: CaptureConfig,
    workspace: Path,
    *,
    records: Path,
    verifier_dir: Path,
    home: Path,
    trust_remote_code: bool = False,
    check: Callable[[Engine], None] | None = None,
    progress: ProgressCallback | None = None,
) -> CaptureReport:
    """A set of the rows that were prepared from `<records>/replies.jsonl`, without an engine where records suffice.

    The last token of a reply was never an input: the set's rows are one token shorter, whichever way they came.

    Raises:
        as `capture_rows`.
    """
    if (records / REPLIES).is_file() and config.source == "engine":
        handles = match_handles(rows, read_regenerated(records / REPLIES))
        there = _lying(records, config) if same_disk(records, workspace) else {}
        try:
            return store_handles(
                rows,
                handles,
                records_reader(records, config),
                layer_ids,
                fingerprint,
                config,
                workspace,
                verifier_dir=verifier_dir,
                freed=sum(there.get(handle.key, 0) for handle in handles.values()),
                progress=progress,
            )
        except RecordsGone as gone:
            log.warning("what has no record is captured by itself: %s", gone.what)
    return capture_rows(
        WithoutLastToken(rows),
        runtime,
        layer_ids,
        fingerprint,
        config,
        workspace,
        verifier_dir=verifier_dir,
        home=home,
        trust_remote_code=trust_remote_code,
        check=check,
        progress=progress,
    )


def records_reader(records: Path, config: CaptureConfig) -> Reader:
    """Reads what `answer` left."""
    return open_reader("file", records_config(_on_disk(config), records))


def _on_disk(config: CaptureConfig) -> CaptureConfig:
    """Records of replies lie until training or a set takes them: they need a disk, whatever rows would travel by."""
    return config.model_copy(update={"backend": "file", "backend_config": {}})


def _room(
    most_bytes: float,
    records: Path,
    config: CaptureConfig,
    conversations: Sequence[Conversation],
    template: ChatTemplate,
    per_token: int,
) -> float:
    """What the states of further replies may take: the rest of `most_bytes`, or less where the disk has less.

    How long replies will be nobody knows; what the prompts alone need is certain.

    Raises:
        DiskSpaceError: not even that will fit.
    """
    some = conversations[:: max(1, len(conversations) // _PROMPTS)]
    tokens = sum(map(len, opening_prompts(some, template))) * len(conversations) // max(1, len(some))
    there = sum(_lying(records, config).values())
    require_disk(records, int(min(most_bytes, tokens * per_token)) - there)
    return min(most_bytes - there, free_bytes(records) - RESERVE_BYTES)


def _lying(records: Path, config: CaptureConfig) -> dict[str, int]:
    """Key → bytes of the records that `answer` has left."""
    store = open_backend("file", records_config(_on_disk(config), records))
    return {entry.key: entry.num_bytes for entry in store.entries()}


class _Promised:
    """Records that replies of this run were promised: those that fit are waited for, others removed as they come."""

    def __init__(self, most_bytes: float, per_token: int, records: Path, config: CaptureConfig) -> None:
        self._left, self._per_token = most_bytes, per_token
        self._records, self._config = records, config
        self._reader = records_reader(records, config)
        self._lock = threading.Lock()
        self._kept: set[str] = set()

    def look(self, turn: RegeneratedTurn) -> None:
        """Keep a turn's record in mind, or remove it where it is beyond the bytes; called from many threads."""
        size = (len(turn.prompt_token_ids) + len(turn.token_ids)) * self._per_token
        with self._lock:
            if self._left >= 0 > self._left - size:
                log.info("there is no room for the states of further replies: they will be captured by themselves")
            self._left -= size
            fits = self._left >= 0
        if not (isinstance(turn.kv_transfer_params, Mapping) and "handle" in turn.kv_transfer_params):
            return
        handle = Handle.from_json(turn.kv_transfer_params["handle"])
        if fits:
            with self._lock:
                self._kept.add(handle.key)
            return
        with suppress(ConnectorError):  # it is written only now
            self._reader.get(handle, _WRITTEN_S)
        self._reader.delete(handle)

    def settle(self, engine_lives: Callable[[], None]) -> None:
        """Wait until all are there: an engine that is stopped drops what it has not written, and says nothing.

        `engine_lives` raises where it doesn't.
        """
        deadline = time.monotonic() + self._config.record_timeout_s
        while owed := self._kept - _lying(self._records, self._config).keys():
            engine_lives()
            if time.monotonic() > deadline:
                log.warning("%d records of replies did not come; what has none is captured by itself", len(owed))
                return
            time.sleep(_LOOK_S)


def publish_replies(answered: Path, target: Path) -> None:
    """The same replies without the addresses of their records: equal replies are equal bytes."""
    lines = []
    for conversation in read_regenerated(answered):
        for turn in conversation["turns"]:
            turn.pop("kv_transfer_params", None)
        lines.append(json.dumps(conversation) + "\n")
    target.write_text("".join(lines), encoding="utf-8")


def match_handles(rows: Rows, conversations: Iterable[Mapping[str, Any]]) -> dict[int, Handle]:
    """Find the record of each row among regenerated conversations, by token ids.

    Args:
        rows: prepared from those conversations.
        conversations: lines of `regenerate`: `turns` with prompt_token_ids, token_ids and kv_transfer_params.

    Returns:
        row index -> handle of the turn that the row ends with; rows that were cut or have no record are left out.
    """
    wanted = {tuple(ids_of(row).tolist()): row.index for row in each(rows)}
    found: dict[int, Handle] = {}
    for conversation in conversations:
        for turn in conversation.get("turns", ()):
            index = wanted.get((*turn["prompt_token_ids"], *turn["token_ids"]))
            parameters = turn.get("kv_transfer_params") or {}
            if index is not None and "handle" in parameters:
                found[index] = Handle.from_json(parameters["handle"])
    return found


def read_regenerated(path: Path) -> Iterable[dict[str, Any]]:
    """Lines of a file that `regenerate` wrote."""
    with path.open(encoding="utf-8") as stream:
        for line in stream:
            yield json.loads(line)


def store_handles(
    rows: Rows,
    handles: Mapping[int, Handle],
    reader: Reader,
    layer_ids: Sequence[int],
    fingerprint: str,
    config: CaptureConfig,
    workspace: Path,
    *,
    verifier_dir: Path,
    freed: int = 0,
    progress: ProgressCallback | None = None,
) -> CaptureReport:
    """Turn records that were captured while replies were generated into a set.

    Args:
        rows: prompt and reply of each row. The last token was never an input: the set's rows are one token shorter.
        handles: row index -> address of its record. Records are deleted when their shard is on disk, so that a killed
            run can be repeated.
        freed: their bytes, where they lie on the workspace's disk.

    Raises:
        as `capture`; RecordsGone for a row without a record that can be read.
    """
    facts = read_facts(verifier_dir)
    layers = check_layers(layer_ids, facts.num_hidden_layers)
    inputs = WithoutLastToken(rows)
    collector = plan_capture(inputs, facts, layers, fingerprint, config, workspace, freed=freed)
    gate = ParityGate(inputs, collector, config, verifier_dir, facts, False)
    gate.prepare()
    tally = Tally()
    started = time.monotonic()
    missing = collector.missing()
    for done, position in enumerate(missing):
        row = inputs.row(position)
        handle = handles.get(row.index)
        if handle is None:
            raise RecordsGone(f"row {row.index} has no captured record", mend="regenerate it, or capture the rows anew")
        try:
            record = reader.get(handle, config.record_timeout_s)
        except ConnectorError as error:
            raise RecordsGone(
                f"the record of row {row.index} cannot be read: {error.what}",
                mend=error.mend or "capture the rows anew",
            ) from error
        record = beginning(record, row, collector.facts)
        durable = collector.add(content_of(row, record.hidden_states))
        tally.add(record)
        for index in durable:
            reader.delete(handles[index])
        if progress is not None:
            progress(done + 1, len(missing))
    tally.seconds = time.monotonic() - started
    return conclude(collector, gate, workspace, tally)


def beginning(record: Record, row: Row, facts: StatesFacts) -> Record:
    """The part of a reply's record that a row holds: less where the row was cut. CaptureError where it is another's."""
    ids = ids_of(row)
    part = replace(record, token_ids=record.token_ids[: len(ids)], hidden_states=record.hidden_states[: len(ids)])
    check_record(part, row.index, ids, facts)
    return part


class WithoutLastToken:
    """Rows without their last token: what of a generated reply was an input of the verifier."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self._rows.num_rows

    def row(self, index: int, /) -> _CutRow:
        """The row at that position, one token shorter."""
        row = self._rows.row(index)
        return _CutRow(row.index, str(row.split), ids_of(row)[:-1], torch.as_tensor(row.loss_mask)[:-1])


class _CutRow:
    def __init__(self, index: int, split: str, input_ids: Tensor, loss_mask: Tensor) -> None:
        self.index, self.split, self.input_ids, self.loss_mask = index, split, input_ids, loss_mask
