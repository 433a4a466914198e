"""`draftsmith hs` on real sets and stores."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from flows.cli_hs import app, as_seconds, find_set
from hs_connectors import open_reader, open_writer
from hs_connectors.contract import Handle
from hs_connectors.testing import assert_same, make_record
from speculators_core.errors import CaptureError, ConfigError, DraftsmithError
from speculators_core.states.collect import Collector, content_of
from speculators_core.states.sets import StateSet
from speculators_core.states.shards import StatesFacts


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Three records, one of them two hours old, and a marker."""
    root = tmp_path / "records"
    writer = open_writer("file", {"root": str(root)})
    writer.announce({"vllm": "0.32.0", "layer_ids": [1, 4, 8]})
    for number in range(3):
        writer.put(f"row-{number}", make_record(10 + number, seed=number))
    writer.fail("row-3", "states are not finite")
    old = time.time() - 7200
    os.utime(root / "row-0.safetensors", (old, old))
    return root


@pytest.fixture
def states(tmp_path: Path) -> Path:
    """A finished set of five rows in three shards."""

    class Row:
        split = "train"

        def __init__(self, index: int) -> None:
            self.index, self.input_ids = index, torch.arange(6)
            self.loss_mask = torch.ones(6, dtype=torch.bool)

    class Rows:
        num_rows = 5

        def row(self, index: int, /) -> Row:
            return Row(index)

    facts = StatesFacts(
        layer_ids=(1, 2), hidden_size=4, dtype="bfloat16", verifier_fingerprint="f" * 64, source="engine"
    )
    directory = tmp_path / "set"
    directory.mkdir()
    collector = Collector(Rows(), facts, directory, shard_tokens=12)
    for number in range(5):
        collector.add(content_of(Row(number), torch.full((6, 2, 4), float(number), dtype=torch.bfloat16)))
    collector.finish({"parity": None})
    return directory


def run(*arguments: object) -> Any:
    """What the command prints as JSON; its own error where it raises one."""
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    if isinstance(result.exception, DraftsmithError):
        raise result.exception
    return json.loads(result.stdout), result.exit_code


def test_ls_lists_records_and_shards(store: Path, states: Path) -> None:
    found, _ = run("ls", store)
    assert (found[0]["key"], found[0]["kind"]) == ("row-0", "record")
    assert {line["key"] for line in found} == {"row-0", "row-1", "row-2", "row-3"}
    assert found[0]["age_s"] > 7000 and found[0]["num_bytes"] > 300
    shards, _ = run("ls", states)
    assert [(line["rows"], line["tokens"]) for line in shards] == [(2, 12), (2, 12), (1, 6)]
    text = CliRunner().invoke(app, ["ls", str(store)]).stdout
    assert "3 records" in text and "1 error markers" in text


def test_inspect_shows_the_writer_the_record_and_the_set(store: Path, states: Path) -> None:
    found, _ = run("inspect", store)
    assert found["engine vllm"] == "0.32.0" and found["content"].startswith("3 records")
    record, _ = run("inspect", store, "row-1")
    assert (record["tokens"], record["layer_ids"], record["dtype"]) == (11, [1, 4, 8], "bfloat16")
    facts, _ = run("inspect", states)
    assert (facts["rows"], facts["tokens"], facts["source"]) == (5, 30, "engine")
    with pytest.raises(DraftsmithError, match="states are not finite"):
        run("inspect", store, "row-3")
    with pytest.raises(ConfigError, match="not a record key"):
        run("inspect", store, "../row-1")


def test_verify_finds_what_was_damaged(store: Path, states: Path) -> None:
    payload = bytearray((store / "row-2.safetensors").read_bytes())
    payload[-3] ^= 4
    (store / "row-2.safetensors").write_bytes(payload)
    found, status = run("verify", store)
    assert status == 1 and found["records"] == 2
    assert {line["key"] for line in found["problems"]} == {"row-2", "row-3"}
    assert run("verify", states) == ({"rows": 5, "problems": []}, 0)
    shard = states / "shard-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    with pytest.raises(CaptureError, match="shard-00001"):
        run("verify", states)


def test_gc_takes_what_is_older_than_a_lease_and_only_when_told(store: Path) -> None:
    assert [line["key"] for line in run("gc", store)[0]] == ["row-0"]
    assert (store / "row-0.safetensors").exists()
    run("gc", store, "--apply")
    assert not (store / "row-0.safetensors").exists()
    assert len(run("ls", store)[0]) == 3
    run("gc", store, "--lease", "0s", "--apply")
    assert run("ls", store)[0] == []


def test_copy_takes_records_to_another_store_and_goes_on(store: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    done, _ = run("copy", store, target)
    assert done["records"] == 3 and done["there"] == 0
    reader = open_reader("file", {"root": str(target)})
    assert_same(reader.get(Handle("file", "row-1"), 0), make_record(11, seed=1))
    assert (reader.announcement() or {})["vllm"] == "0.32.0"
    (target / "row-2.safetensors").unlink()
    again, _ = run("copy", store, target)
    assert (again["records"], again["there"]) == (1, 2)
    (target / "row-0.safetensors").write_bytes((store / "row-0.safetensors").read_bytes()[::-1])
    open_writer("file", {"root": str(target)}).put("row-1", make_record(11, seed=9))
    again, _ = run("copy", store, target)
    assert (again["records"], again["there"]) == (2, 1), "of equal size, and of other bytes"
    assert_same(reader.get(Handle("file", "row-0"), 0), make_record(10, seed=0))
    assert_same(reader.get(Handle("file", "row-1"), 0), make_record(11, seed=1))
    (store / "row-1.safetensors").write_bytes(b"not a record at all")
    with pytest.raises(DraftsmithError, match=r"row-1[\s\S]*mend: delete it"):
        run("copy", store, target)


def test_what_is_no_record_is_named_and_stops_nothing(store: Path, tmp_path: Path) -> None:
    os.mkfifo(store / "pipe.safetensors")
    (store / "link.safetensors").symlink_to(store / "row-1.safetensors")
    (store / "directory.safetensors").mkdir()
    (store / "note.error.json").write_text('{"code": 1}')
    odd = {"pipe", "link", "directory", "note"}
    found, status = run("verify", store)
    assert status == 1 and found["records"] == 3
    assert {line["key"] for line in found["problems"]} == odd | {"row-3"}
    for told in ([], ["--apply"]):
        found, status = run("gc", store, "--lease", "0s", *told)
        assert status == 1 and {line["key"] for line in found if line["problem"]} == odd
        assert {line["key"] for line in found if not line["problem"]} == {"row-0", "row-1", "row-2", "row-3"}
    assert {path.name.partition(".")[0] for path in store.iterdir()} == odd | {"engine"}
    text = CliRunner().invoke(app, ["gc", str(store), "--lease", "0s"]).stdout
    assert "no error marker of ours" in text and "would delete 0 records" in text
    with pytest.raises(DraftsmithError, match=r"safetensors[\s\S]*mend: .*move it away"):
        run("copy", store, tmp_path / "copy")


def test_copy_mixes_neither_engines_nor_weights(store: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    other = open_writer("file", {"root": str(target)})
    other.announce({"vllm": "0.31.0", "layer_ids": [2, 5], "verifier_fingerprint": "f"})
    with pytest.raises(
        ConfigError, match=r"layer_ids: \[1, 4, 8\] here, \[2, 5\] in the target[\s\S]*mend: copy to a new"
    ):
        run("copy", store, target)
    assert [path.name for path in target.iterdir()] == ["engine.json"]
    other.announce({"vllm": "0.31.0", "layer_ids": [1, 4, 8]})
    save_file({"lm_head.weight": torch.ones(4, 4)}, store / "model.safetensors")
    save_file({"lm_head.weight": torch.ones(4, 4)}, target / "row-1.safetensors")
    weights = (target / "row-1.safetensors").read_bytes()
    with pytest.raises(ConfigError, match="row-1 of the target holds tensors"):
        run("copy", store, target)
    assert (target / "row-1.safetensors").read_bytes() == weights
    (target / "row-1.safetensors").unlink()
    assert run("copy", store, target)[0] == {"records": 2, "num_bytes": ANY, "there": 1}
    assert not (target / "model.safetensors").exists()
    assert json.loads((target / "engine.json").read_text())["vllm"] == "0.31.0", "it may be running"


def test_copy_of_a_set_is_a_set_and_goes_on(states: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    assert run("copy", states, target)[0] == {"rows": 5}
    copied = StateSet.open(target)
    copied.verify()
    assert [float(row.hidden_states.flatten()[0]) for row in copied.rows()] == [0, 1, 2, 3, 4]
    with pytest.raises(CaptureError, match="holds a set already"):
        run("copy", states, target)
    (target / "states.json").unlink()
    (target / "shard-00000.safetensors").write_bytes(b"half")
    assert run("copy", states, target)[0] == {"rows": 5}
    StateSet.open(target).verify()


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("pigeon:loft", "no backend is called 'pigeon'"),
        ("/no/such/directory", "there is no directory"),
        ("shm:", "does not say where"),
        ("shm:../x", "not a space"),
        ("file:{", "not JSON"),
        ('file:{"rooot": "x"}', "rooot"),
    ],
)
def test_a_place_that_is_none_is_named(place: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run("ls", place)


def test_a_directory_with_nothing_of_ours_is_no_empty_store(tmp_path: Path, store: Path) -> None:
    folder, empty = tmp_path / "photos", tmp_path / "empty"
    folder.mkdir()
    empty.mkdir()
    (folder / "holiday.jpg").write_bytes(b"x")
    for command in ("ls", "inspect", "verify", "gc"):
        with pytest.raises(ConfigError, match="neither a set nor a store"):
            run(command, folder)
        with pytest.raises(ConfigError, match="is a file"):
            run(command, folder / "holiday.jpg")
        assert run(command, empty)[1] == 0
    (empty / f".row-1.safetensors.{'a' * 16}.part").write_bytes(b"x")
    assert run("gc", empty) == ([], 0), "what a killed writer left is ours"
    for path in store.iterdir():
        if path.name != "engine.json":
            path.unlink()
    assert run("ls", store) == ([], 0), "an engine announced itself, and has written nothing"


def test_times() -> None:
    assert [as_seconds(text) for text in ("90", "90s", "15m", "1h", "7d", "0s")] == [90, 90, 900, 3600, 604800, 0]
    for wrong in ("", "h", "-1s", "soon", "inf", "nan"):
        with pytest.raises(ConfigError, match="no time"):
            as_seconds(wrong)


def test_gc_touches_neither_a_set_nor_weights(states: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a finished set, no store"):
        CliRunner().invoke(app, ["gc", str(states), "--apply", "--lease", "0s"], catch_exceptions=False)
    weights = tmp_path / "model" / "model.safetensors"
    weights.parent.mkdir()
    save_file({"lm_head.weight": torch.ones(4, 4)}, weights)
    open_writer("file", {"root": str(weights.parent)}).put("row-0", make_record(9))
    for told in ([], ["--apply"]):
        found, _ = run("gc", weights.parent, "--lease", "0s", *told)
        assert [line["key"] for line in found] == ["row-0"], "and no word of the weights"
    assert [path.name for path in weights.parent.iterdir()] == ["model.safetensors"]
    StateSet.open(str(states)).verify()


def test_an_artifact_of_the_store_is_the_set_in_it(states: Path, tmp_path: Path) -> None:
    artifact = tmp_path / "artifact"
    artifact.mkdir()
    states.rename(artifact / "data")
    found = find_set(str(artifact))
    assert found is not None and found.num_rows == 5
