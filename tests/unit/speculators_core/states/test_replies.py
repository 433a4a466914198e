"""Records that were left by the requests that wrote the replies: what becomes a set, and what is missed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from synthetic_states import FACTS, make_rows, record_for

from hs_connectors.contract import Handle
from hs_connectors.registry import open_reader, open_writer
from speculators_core.states.capture import CaptureReport
from speculators_core.states.config import CaptureConfig
from speculators_core.states.replies import RecordsGone, publish_replies, store_handles
from speculators_core.states.sets import StateSet
from tests.unit.speculators_core.algorithms.tiny import write_verifier

LENGTHS = [5, 9, 30, 4, 7, 3, 12, 8, 6]


def test_rows_without_records_are_missed_and_what_is_stored_stays(tmp_path: Path) -> None:
    verifier = write_verifier(tmp_path / "verifier", hidden_size=8, num_hidden_layers=4)
    rows, root = make_rows(LENGTHS), {"root": str(tmp_path / "records"), "fsync": False}
    writer, reader = open_writer("file", root), open_reader("file", root)
    config = CaptureConfig(parity_rows=0, shard_tokens=20, record_timeout_s=0.2)
    for row in rows.content:
        writer.put(f"r{row.index}", record_for(row))
    handles = {row.index: Handle("file", f"r{row.index}") for row in rows.content}

    def store(some: dict[int, Handle]) -> CaptureReport:
        layers, fingerprint, target = FACTS.layer_ids, FACTS.verifier_fingerprint, tmp_path / "set"
        return store_handles(rows, some, reader, layers, fingerprint, config, target, verifier_dir=verifier)

    with pytest.raises(RecordsGone, match="row 6 has no captured record"):
        store({index: handle for index, handle in handles.items() if index != 6})
    (tmp_path / "records" / "r7.safetensors").unlink()
    with pytest.raises(RecordsGone, match="record of row 7 cannot be read"):
        store(handles)
    writer.put("r7", record_for(rows.content[7]))
    report = store(handles)
    assert report.reused_shards > 0 and report.rows == len(LENGTHS)
    states = StateSet.open(tmp_path / "set")
    for row in rows.content:
        stored = states.row(row.index)
        assert stored.input_ids.tolist() == row.input_ids[:-1].tolist(), "the last token was never an input"
        assert torch.equal(stored.hidden_states, record_for(row).hidden_states[:-1])
    assert not list((tmp_path / "records").glob("*.safetensors")), "what is in the set is not kept twice"


def test_published_replies_do_not_say_where_their_records_lay(tmp_path: Path) -> None:
    for key in ("a", "b"):
        turn = {"message": 1, "token_ids": [3], "kv_transfer_params": {"handle": {"backend": "file", "key": key}}}
        line = {"id": "x", "messages": [], "turns": [turn, {"message": 3, "token_ids": [4]}], "cut": None}
        (tmp_path / f"{key}.jsonl").write_text(json.dumps(line) + "\n")
        publish_replies(tmp_path / f"{key}.jsonl", tmp_path / f"{key}.out")
    published = (tmp_path / "a.out").read_bytes()
    assert published == (tmp_path / "b.out").read_bytes()
    assert [turn["token_ids"] for turn in json.loads(published)["turns"]] == [[3], [4]]
