"""The Hugging Face source: the right layers, before the final norm, and through the same gates and shards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from synthetic_states import FACTS, make_rows

from speculators_core.errors import CaptureError, ConfigError, VerifierError
from speculators_core.states.capture import capture_rows, estimate_bytes
from speculators_core.states.config import CaptureConfig
from speculators_core.states.hf import HiddenStateForward, parameter_count, reference_dtype
from speculators_core.states.replies import WithoutLastToken
from speculators_core.states.sets import StateSet
from speculators_core.verifier.facts import read_facts

LENGTHS = [5, 9, 30, 4, 7, 3, 12, 8, 6]


@pytest.fixture(scope="session")
def tiny_verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
    )
    directory = tmp_path_factory.mktemp("verifier")
    model = LlamaForCausalLM(config).to(torch.float32)
    model.model.norm.weight.data.uniform_(0.5, 2.0)  # so that before and after the norm are easy to tell apart
    model.save_pretrained(directory)
    return directory


def test_states_are_the_residual_stream_and_the_last_is_before_the_norm(tiny_verifier: Path):
    from transformers import AutoModelForCausalLM

    ids = torch.arange(10) * 5
    states = HiddenStateForward(tiny_verifier, (0, 2, 4), "float32")(ids)
    model = AutoModelForCausalLM.from_pretrained(tiny_verifier, dtype=torch.float32)
    output = model(ids[None], output_hidden_states=True)
    assert states.shape == (10, 3, 16)
    torch.testing.assert_close(states[:, 0], output.hidden_states[0][0])
    torch.testing.assert_close(states[:, 1], output.hidden_states[2][0])
    torch.testing.assert_close(model.model.norm(states[:, 2]), output.hidden_states[4][0])
    assert not torch.allclose(states[:, 2], output.hidden_states[4][0], atol=0.1)


def capture(tiny_verifier: Path, tmp_path: Path, **settings: object):
    config = CaptureConfig(source="hf", dtype="float32", shard_tokens=20, **settings)
    return capture_rows(
        make_rows(LENGTHS),
        None,
        (1, 2, 4),
        "f" * 64,
        config,
        tmp_path / "set",
        verifier_dir=tiny_verifier,
        home=tmp_path,
    )


def test_a_capture_by_hugging_face_writes_the_same_kind_of_set(tiny_verifier: Path, tmp_path: Path):
    seen: list[tuple[int, int]] = []
    config = CaptureConfig(source="hf", dtype="float32", shard_tokens=20)
    report = capture_rows(
        make_rows(LENGTHS),
        None,
        (1, 2, 4),
        "f" * 64,
        config,
        tmp_path / "set",
        verifier_dir=tiny_verifier,
        home=tmp_path,
        progress=lambda done, total: seen.append((done, total)),
    )
    states = StateSet.open(tmp_path / "set")
    states.verify()
    assert (states.facts.source, states.num_rows, states.hidden_size) == ("hf", 9, 16)
    assert (report.rows, report.tokens, report.shards, report.captured_rows) == (9, sum(LENGTHS), 5, 9)
    assert seen[-1] == (9, 9) and report.tokens_per_second > 0
    forward = HiddenStateForward(tiny_verifier, (1, 2, 4), "float32")
    for row in states.rows():
        torch.testing.assert_close(row.hidden_states, forward(row.input_ids))
    sizes = sum(path.stat().st_size for path in (tmp_path / "set").glob("shard-*"))
    estimate = estimate_bytes(make_rows(LENGTHS), read_facts(tiny_verifier), (1, 2, 4), "float32")
    assert estimate == report.num_bytes <= sizes <= estimate + 5 * 2000  # headers


def test_a_finished_capture_is_not_repeated(tiny_verifier: Path, tmp_path: Path):
    capture(tiny_verifier, tmp_path)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "set").glob("shard-*")}
    again = capture(tiny_verifier, tmp_path)
    assert (again.captured_rows, again.reused_shards) == (0, 5)
    assert before == {path.name: path.stat().st_mtime_ns for path in (tmp_path / "set").glob("shard-*")}


def test_too_little_disk_is_refused_before_the_first_row(tiny_verifier: Path, tmp_path: Path, monkeypatch):
    import shutil

    from speculators_core.errors import DiskSpaceError

    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10_000, 9_000, 1_000))
    with pytest.raises(DiskSpaceError, match=r"the hidden states need 0\.00 GiB"):
        capture(tiny_verifier, tmp_path)


def test_wrong_layers_and_long_rows_are_refused_before_the_engine_starts(tiny_verifier: Path, tmp_path: Path):
    common = {"verifier_dir": tiny_verifier, "home": tmp_path}
    with pytest.raises(ConfigError, match="out of range: the verifier has 4 layers"):
        capture_rows(make_rows([5]), None, (1, 7), "f", CaptureConfig(), tmp_path / "a", **common)
    with pytest.raises(CaptureError, match="longest row has 32 tokens, and the verifier's context holds 32"):
        capture_rows(make_rows([5, 32]), None, (1, 4), "f", CaptureConfig(), tmp_path / "b", **common)


def test_a_directory_without_a_model_is_refused(tmp_path: Path):
    with pytest.raises(VerifierError, match=r"no config\.json"):
        HiddenStateForward(tmp_path, (1,), "float32")
    (tmp_path / "config.json").write_text('{"model_type": "somebodys_own"}')
    with pytest.raises(VerifierError, match="transformers cannot load"):
        HiddenStateForward(tmp_path, (1,), "float32")


def test_the_reference_gets_the_widest_dtype_that_fits(tiny_verifier: Path):
    gib = parameter_count(tiny_verifier) / (1 << 30)
    assert reference_dtype(tiny_verifier, gib * 5) == "float32"
    assert reference_dtype(tiny_verifier, gib * 3) == "bfloat16"
    assert reference_dtype(tiny_verifier, gib) is None


def test_rows_of_generated_replies_lose_the_token_that_was_never_an_input():
    rows = make_rows([6, 4])
    cut = WithoutLastToken(rows)
    assert cut.num_rows == 2 and torch.equal(cut.row(0).input_ids, rows.row(0).input_ids[:-1].long())
    assert cut.row(1).loss_mask.shape == (3,) and FACTS.layer_ids[-1] == 4
