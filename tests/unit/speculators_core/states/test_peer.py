"""The peer's layout: written as it reads it, read as it writes it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from synthetic_states import FACTS, make_rows, states_for

from speculators_core.errors import CaptureError, DataError
from speculators_core.states.collect import Collector, content_of
from speculators_core.states.peer import export_peer, import_peer, token_frequencies
from speculators_core.states.sets import StateSet

LENGTHS = [5, 9, 30, 4, 7]


@pytest.fixture
def states(tmp_path: Path) -> StateSet:
    rows = make_rows(LENGTHS)
    collector = Collector(rows, FACTS, tmp_path / "set", 20)
    for row in rows.content:
        collector.add(content_of(row, states_for(row)))
    collector.finish({})
    return StateSet.open(tmp_path / "set")


def test_export_writes_the_layout_of_the_peer(states: StateSet, tmp_path: Path):
    from datasets import load_from_disk

    assert export_peer(states, tmp_path / "peer") == 5
    data = load_from_disk(str(tmp_path / "peer"))
    assert data.column_names == ["input_ids", "loss_mask", "seq_len"] and data.format["type"] == "torch"
    for number, row in enumerate(states.rows()):
        tensors = load_file(tmp_path / "peer" / "hidden_states" / f"hs_{number}.safetensors")
        assert set(tensors) == {"hidden_states", "token_ids"}
        assert tensors["token_ids"].dtype == torch.int64 and torch.equal(tensors["token_ids"], row.input_ids)
        assert torch.equal(tensors["hidden_states"], row.hidden_states)
        assert torch.equal(data[number]["input_ids"], row.input_ids)
        assert torch.equal(data[number]["loss_mask"], row.loss_mask.long())
        assert int(data[number]["seq_len"]) == len(row.input_ids)


def test_export_of_one_split_renumbers_its_rows(states: StateSet, tmp_path: Path):
    assert export_peer(states, tmp_path / "peer", split="validation") == 1
    tensors = load_file(tmp_path / "peer" / "hidden_states" / "hs_0.safetensors")
    assert torch.equal(tensors["token_ids"], states.row(3).input_ids)
    assert not (tmp_path / "peer" / "hidden_states" / "hs_1.safetensors").exists()


def test_a_round_trip_gives_the_same_rows(states: StateSet, tmp_path: Path):
    export_peer(states, tmp_path / "peer")
    import_peer(tmp_path / "peer", tmp_path / "back", FACTS.layer_ids, "f" * 64, validation_rows=[3], shard_tokens=12)
    back = StateSet.open(tmp_path / "back")
    back.verify()
    assert (back.facts.source, back.splits) == ("peer", states.splits)
    for ours, theirs in zip(states.rows(), back.rows(), strict=True):
        assert torch.equal(ours.hidden_states, theirs.hidden_states) and torch.equal(ours.loss_mask, theirs.loss_mask)


def test_fp8_files_with_a_scale_a_token_are_read(states: StateSet, tmp_path: Path):
    export_peer(states, tmp_path / "peer")
    for number, row in enumerate(states.rows()):
        values = row.hidden_states.float()
        scales = values.abs().amax(dim=(1, 2), keepdim=True) / 448
        tensors = {
            "hidden_states": (values / scales).to(torch.float8_e4m3fn),
            "hidden_states_scales": scales,
            "token_ids": row.input_ids,
        }
        save_file(tensors, tmp_path / "peer" / "hidden_states" / f"hs_{number}.safetensors")
    import_peer(tmp_path / "peer", tmp_path / "back", FACTS.layer_ids, "f" * 64)
    back = StateSet.open(tmp_path / "back").row(2)
    assert back.hidden_states.dtype == torch.bfloat16
    cosine = torch.cosine_similarity(back.hidden_states.float(), states.row(2).hidden_states.float(), dim=-1)
    assert cosine.min() > 0.998


def test_planted_faults_are_named(states: StateSet, tmp_path: Path):
    export_peer(states, tmp_path / "peer")
    folder = tmp_path / "peer" / "hidden_states"
    with pytest.raises(CaptureError, match="2 layers were named"):
        import_peer(tmp_path / "peer", tmp_path / "a", (1, 4), "f")
    good = load_file(folder / "hs_2.safetensors")
    save_file({**good, "token_ids": good["token_ids"] + 1}, folder / "hs_2.safetensors")
    with pytest.raises(CaptureError, match=r"hs_2\.safetensors holds other tokens than row 2"):
        import_peer(tmp_path / "peer", tmp_path / "b", FACTS.layer_ids, "f")
    bad = good["hidden_states"].clone()
    bad[3, 1, 0] = float("nan")
    save_file({**good, "hidden_states": bad}, folder / "hs_2.safetensors")
    with pytest.raises(CaptureError, match="layer 2 at token 3 is not finite"):
        import_peer(tmp_path / "peer", tmp_path / "c", FACTS.layer_ids, "f")
    (folder / "hs_2.safetensors").unlink()
    with pytest.raises(CaptureError, match=r"hs_2\.safetensors cannot be read"):
        import_peer(tmp_path / "peer", tmp_path / "d", FACTS.layer_ids, "f")
    with pytest.raises(DataError, match="holds no data set"):
        import_peer(tmp_path / "set", tmp_path / "e", FACTS.layer_ids, "f")


def test_token_frequencies_count_supervised_tokens(states: StateSet):
    counts = token_frequencies(states, 64)
    assert int(counts.sum()) == sum(int(row.loss_mask.sum()) for row in states.rows())
    row = states.row(0)
    assert all(counts[token] >= 1 for token in row.input_ids[row.loss_mask])
