"""Shards and sets: what goes in comes out, in bounded memory, and damage is seen."""

from __future__ import annotations

import pickle
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from synthetic_states import FACTS, ListOfRows, make_rows, states_for

from speculators_core.errors import CaptureError, DataError
from speculators_core.states.collect import Collector, content_of, plan_shards
from speculators_core.states.sets import StateSet

LENGTHS = [5, 9, 30, 4, 7, 3, 12, 8, 6]


def collect(rows: ListOfRows, workspace: Path, order: list[int] | None = None, shard_tokens: int = 20) -> Collector:
    collector = Collector(rows, FACTS, workspace, shard_tokens)
    for position in order if order is not None else collector.missing():
        row = rows.row(position)
        collector.add(content_of(row, states_for(row)))
    return collector


def captured(tmp_path: Path) -> tuple[ListOfRows, StateSet]:
    rows = make_rows(LENGTHS)
    collect(rows, tmp_path).finish({})
    return rows, StateSet.open(tmp_path)


def test_shards_hold_whole_rows():
    assert plan_shards(LENGTHS, 20) == (0, 2, 3, 6, 8, 9)
    assert plan_shards([100], 20) == (0, 1)
    assert plan_shards([20, 1], 20) == (0, 1, 2)


def test_a_set_gives_back_every_row(tmp_path: Path):
    rows, states = captured(tmp_path)
    assert (states.num_rows, states.num_tokens) == (len(LENGTHS), sum(LENGTHS))
    assert states.lengths == LENGTHS and states.row_indices == list(range(len(LENGTHS)))
    assert (states.layer_ids, states.hidden_size, states.dtype) == ((1, 2, 4), 8, torch.bfloat16)
    for position, row in enumerate(states.rows()):
        expected = rows.row(position)
        assert (row.index, row.split) == (expected.index, expected.split) and states.splits[position] == row.split
        assert row.input_ids.dtype == torch.int64 and row.loss_mask.dtype == torch.bool
        assert torch.equal(row.input_ids, expected.input_ids.long())
        assert torch.equal(row.loss_mask, expected.loss_mask.bool())
        assert torch.equal(row.hidden_states, states_for(expected))
    states.verify()


@pytest.mark.parametrize("file", ["../.bashrc", "/etc/hosts", "shard-00000.safetensors/../x", "states.json"])
def test_a_set_names_no_file_but_its_shards(tmp_path: Path, file: str) -> None:
    captured(tmp_path)
    index = tmp_path / "states.json"
    index.write_text(index.read_text().replace("shard-00000.safetensors", file))
    with pytest.raises(CaptureError, match=r"states\.json cannot be read"):
        StateSet.open(tmp_path)


def test_files_do_not_depend_on_the_order_of_arrival(tmp_path: Path):
    rows = make_rows(LENGTHS)
    shuffled = list(range(len(LENGTHS)))
    random.Random(1).shuffle(shuffled)
    collect(rows, tmp_path / "a").finish({})
    collect(rows, tmp_path / "b", shuffled).finish({})
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == ["shard-00000.safetensors", *(f"shard-0000{n}.safetensors" for n in range(1, 5)), "states.json"]
    assert names == sorted(path.name for path in (tmp_path / "b").iterdir())
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_shard_tensors_are_the_documented_ones(tmp_path: Path):
    captured(tmp_path)
    tensors = load_file(tmp_path / "shard-00000.safetensors")
    assert {name: (tensor.dtype, list(tensor.shape)) for name, tensor in tensors.items()} == {
        "hidden_states": (torch.bfloat16, [14, 3, 8]),
        "input_ids": (torch.int64, [14]),
        "loss_mask": (torch.uint8, [14]),
        "offsets": (torch.int64, [3]),
        "row_index": (torch.int64, [2]),
        "split": (torch.uint8, [2]),
    }


def test_rows_are_views_of_mapped_memory(tmp_path: Path):
    _, states = captured(tmp_path)
    first = states.row(1).hidden_states
    assert first.untyped_storage().data_ptr() == states.row(1).hidden_states.untyped_storage().data_ptr()
    assert first.untyped_storage().nbytes() > first.nbytes  # the shard's map, not a copy of the row


def test_a_set_opens_again_in_another_process(tmp_path: Path):
    _, states = captured(tmp_path)
    again = pickle.loads(pickle.dumps(states))
    assert torch.equal(again.row(4).hidden_states, states.row(4).hidden_states)


def test_resuming_keeps_finished_shards(tmp_path: Path):
    rows = make_rows(LENGTHS)
    first = collect(rows, tmp_path, [0, 1, 2, 3, 4])  # two shards and a part of the third
    assert first.missing() == [3, 4, 5, 6, 7, 8]
    before = (tmp_path / "shard-00001.safetensors").stat().st_mtime_ns
    again = Collector(rows, FACTS, tmp_path, 999)  # another shard size doesn't undo what is finished
    assert (again.reused_shards, again.missing(), again.num_shards) == (2, [3, 4, 5, 6, 7, 8], 5)
    with pytest.raises(CaptureError, match="not missing"):
        again.add(content_of(rows.row(0), states_for(rows.row(0))))
    with pytest.raises(CaptureError, match="6 of 9 rows have no states"):
        again.finish({})
    collect(rows, tmp_path).finish({})
    assert (tmp_path / "shard-00001.safetensors").stat().st_mtime_ns == before
    assert StateSet.open(tmp_path).num_rows == 9


def test_other_rows_start_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    collect(make_rows(LENGTHS), tmp_path)
    assert Collector(make_rows([*LENGTHS[:-1], 7]), FACTS, tmp_path, 20).reused_shards == 0
    assert "another capture" in caplog.text and not list(tmp_path.glob("shard-*"))


def flip(path: Path, offset: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 4
    path.write_bytes(raw)


@pytest.mark.parametrize("offset", [-1, -40, -900])
def test_a_flipped_bit_is_captured_again_and_nothing_else(tmp_path: Path, offset: int, caplog):
    rows = make_rows(LENGTHS)
    collect(rows, tmp_path)
    flip(tmp_path / "shard-00001.safetensors", offset)
    again = Collector(rows, FACTS, tmp_path, 20)
    assert again.missing() == [2] and "shard-00001.safetensors is damaged" in caplog.text


def test_verify_names_the_damaged_shard_and_the_cure(tmp_path: Path):
    _, states = captured(tmp_path)
    flip(tmp_path / "shard-00002.safetensors", -8)
    with pytest.raises(CaptureError, match=r"(?s)shard-00002.*checksum of .* differs.*mend: delete that file"):
        states.verify()


def test_a_torn_or_missing_shard_is_named(tmp_path: Path):
    captured(tmp_path)
    path = tmp_path / "shard-00003.safetensors"
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) // 2])
    with pytest.raises(CaptureError, match="shard-00003"):
        StateSet.open(tmp_path)
    path.unlink()
    with pytest.raises(CaptureError, match="shard-00003"):
        StateSet.open(tmp_path)


def test_an_unfinished_set_is_not_a_set(tmp_path: Path):
    collect(make_rows(LENGTHS), tmp_path)
    with pytest.raises(CaptureError, match="no finished hidden-state set"):
        StateSet.open(tmp_path)


@pytest.mark.parametrize(("lengths", "message"), [([], "no rows"), ([3, 0], "row 1 is empty")])
def test_unusable_rows_are_refused(tmp_path: Path, lengths: list[int], message: str):
    with pytest.raises(DataError, match=message):
        Collector(make_rows(lengths), FACTS, tmp_path, 20)


def anonymous_mib() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) / 1024


def test_writing_and_reading_take_the_memory_of_a_few_shards(tmp_path: Path):
    facts = FACTS.model_copy(update={"hidden_size": 512})
    rows = make_rows([400] * 100)  # 117 MiB of states in shards of 6 MiB
    collector = Collector(rows, facts, tmp_path, 2000)
    states_for(rows.row(0), facts)
    before = peak = anonymous_mib()
    for row in rows.content:
        collector.add(content_of(row, states_for(row, facts)))
        peak = max(peak, anonymous_mib())
    collector.finish({})
    states = StateSet.open(tmp_path)
    total = 0.0
    for row in states.rows():
        total += float(row.hidden_states[:, 0].float().abs().mean())
        peak = max(peak, anonymous_mib())
    assert total > 0 and states.num_tokens == 40_000
    assert peak - before < 40, f"{peak - before:.0f} MiB"
