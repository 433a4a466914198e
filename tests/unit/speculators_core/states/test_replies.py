"""Records that were left by the requests that wrote the replies: what becomes a set, and what is missed."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from synthetic_states import FACTS, ListOfRows, make_rows, record_for

from hs_connectors.contract import Handle
from hs_connectors.registry import open_reader, open_writer
from speculators_core.data.regenerate import RegeneratedTurn
from speculators_core.engine.remote import CaptureTerms
from speculators_core.states.capture import RECORDS_NAME, CaptureReport
from speculators_core.states.config import CaptureConfig, HiddenStatesConfig, OnlineRequest
from speculators_core.states.kept import KeptRows
from speculators_core.states.online import keep_answers
from speculators_core.states.replies import (
    REPLIES,
    RecordsGone,
    WithoutLastToken,
    _Promised,
    _room,
    capture_answers,
    publish_replies,
    store_handles,
)
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


@pytest.fixture
def answered(tmp_path: Path) -> tuple[ListOfRows, Path, list[RegeneratedTurn]]:
    """Rows, where the records of their replies lie, and these."""
    rows, records, turns = make_rows(LENGTHS), tmp_path / "records", []
    writer = open_writer("file", {"root": str(records / RECORDS_NAME), "fsync": False})
    for row in rows.content:
        whole, ids = record_for(row), row.input_ids.tolist()
        part = replace(whole, token_ids=whole.token_ids[:-1], hidden_states=whole.hidden_states[:-1])
        told = {"handle": writer.put(f"r{row.index}", part).to_json()}
        turns.append(RegeneratedTurn(f"c{row.index}", 1, tuple(ids[:2]), tuple(ids[2:]), "stop", told))
    lines = [json.dumps({"turns": [asdict(turn)]}) for turn in turns]
    (records / REPLIES).write_text("\n".join(lines))
    return rows, records, turns


def test_training_keeps_the_states_that_replies_left_as_far_as_it_keeps_rows(
    answered: tuple[ListOfRows, Path, list[RegeneratedTurn]], tmp_path: Path
) -> None:
    rows, records, _ = answered
    terms = CaptureTerms(
        layer_ids=FACTS.layer_ids, states_dtype=FACTS.dtype, codec="none",
        verifier_fingerprint=FACTS.verifier_fingerprint, context=99,
    )  # fmt: skip
    quota = 40 * FACTS.bytes_per_token / 2**30
    request = OnlineRequest(
        dataset="", dataset_digest="d", terms=terms, command=("serve",), hidden_size=FACTS.hidden_size, book="",
        cache=str(tmp_path / "kept"), capture=CaptureConfig(), without_last=True,
        states=HiddenStatesConfig(mode="hybrid", cache_gib=quota),
    )  # fmt: skip
    (records / RECORDS_NAME / "r1.safetensors").unlink()
    number = keep_answers(rows, records, request)
    cut = WithoutLastToken(rows)
    lengths = [length - 1 for length in LENGTHS]
    kept = KeptRows(tmp_path / "kept", FACTS, lengths, [row.split for row in rows.content], 40 * FACTS.bytes_per_token)
    found = {position: kept.get(position, cut.row(position)) for position in kept.positions}
    assert found[1] is None and 2 < number == len(found) - 1 < len(LENGTHS) - 1
    for position, states in found.items():
        if states is not None:
            assert torch.equal(states, record_for(rows.content[position]).hidden_states[:-1])
    assert not records.exists(), "what is kept is kept once"
    assert keep_answers(rows, records, request) == 0


def test_records_beyond_the_quota_are_removed_as_they_come(
    answered: tuple[ListOfRows, Path, list[RegeneratedTurn]],
) -> None:
    _, records, turns = answered
    promised = _Promised(50, 1, records, CaptureConfig())
    for turn in turns:
        promised.look(turn)
    left = {path.stem for path in (records / RECORDS_NAME).glob("*.safetensors")}
    assert left == {"r0", "r1", "r2", "r3"}, "5 + 9 + 30 + 4 tokens"
    there = sum(path.stat().st_size for path in (records / RECORDS_NAME).iterdir())
    rest = _room(1e6, records, CaptureConfig(), [], SimpleNamespace(), 1)  # type: ignore[arg-type]
    assert rest == 1e6 - there, "what a run that was cut off has left counts"


def test_the_engine_is_not_stopped_before_what_it_promised_is_there(
    answered: tuple[ListOfRows, Path, list[RegeneratedTurn]], caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM kills its workers at a stop, with what their writers still hold; an error marker is an answer too."""
    _, records, turns = answered
    promised = _Promised(1e9, 1, records, CaptureConfig(record_timeout_s=20))
    for turn in turns:
        promised.look(turn)
    promised.settle(lambda: None)

    late, failed = (records / RECORDS_NAME / f"{name}.safetensors" for name in ("r3", "r4"))
    late.rename(late.with_suffix(".away"))
    failed.unlink()
    looks: list[int] = []

    def engine_lives() -> None:
        looks.append(1)
        if len(looks) == 2:
            open_writer("file", {"root": str(records / RECORDS_NAME)}).fail("r4", "no room")
        if len(looks) == 3:
            late.with_suffix(".away").rename(late)

    promised.settle(engine_lives)
    assert len(looks) == 3 and not caplog.records
    late.unlink()
    hasty = _Promised(1e9, 1, records, CaptureConfig(record_timeout_s=0.3))
    for turn in turns:
        hasty.look(turn)
    hasty.settle(lambda: None)
    assert "1 records of replies did not come" in caplog.text


def test_records_that_become_a_set_do_not_need_their_room_twice(
    answered: tuple[ListOfRows, Path, list[RegeneratedTurn]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, records, _ = answered
    verifier = write_verifier(tmp_path / "verifier", hidden_size=8, num_hidden_layers=4)
    need, free = 2 * (sum(LENGTHS) - len(LENGTHS)) * FACTS.bytes_per_token, 100 * FACTS.bytes_per_token
    assert need > free, "what is missing, and what is in flight meanwhile"
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    report = capture_answers(
        rows, None, FACTS.layer_ids, FACTS.verifier_fingerprint, CaptureConfig(parity_rows=0, concurrency=1),
        tmp_path / "set", records=records, verifier_dir=verifier, home=tmp_path,
    )  # fmt: skip
    assert report.rows == len(LENGTHS)


def test_published_replies_do_not_say_where_their_records_lay(tmp_path: Path) -> None:
    for key in ("a", "b"):
        turn = {"message": 1, "token_ids": [3], "kv_transfer_params": {"handle": {"backend": "file", "key": key}}}
        line = {"id": "x", "messages": [], "turns": [turn, {"message": 3, "token_ids": [4]}], "cut": None}
        (tmp_path / f"{key}.jsonl").write_text(json.dumps(line) + "\n")
        publish_replies(tmp_path / f"{key}.jsonl", tmp_path / f"{key}.out")
    published = (tmp_path / "a.out").read_bytes()
    assert published == (tmp_path / "b.out").read_bytes()
    assert [turn["token_ids"] for turn in json.loads(published)["turns"]] == [[3], [4]]
