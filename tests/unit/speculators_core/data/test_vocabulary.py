"""Draft vocabularies, against the golden vectors of tests/fixtures/numeric/README.md."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from speculators_core.data.vocabulary import given_vocabulary, select_draft_vocabulary
from speculators_core.errors import ConfigError, DataError


def counts(of: dict[int, int], size: int) -> torch.Tensor:
    table = torch.zeros(size, dtype=torch.int64)
    for token, count in of.items():
        table[token] = count
    return table


def test_golden_vectors() -> None:
    kept = select_draft_vocabulary(counts({5: 10, 2: 7, 9: 7, 0: 1}, 12), 3, 12)
    assert kept.d2t.tolist() == [2, 4, 7] and kept.verifier_ids().tolist() == [2, 5, 9]
    assert torch.nonzero(kept.t2d).flatten().tolist() == [2, 5, 9]
    assert kept.coverage(counts({5: 10, 2: 7, 9: 7, 0: 1}, 12)) == pytest.approx(24 / 25)
    filled = select_draft_vocabulary(counts({5: 10}, 12), 4, 12)
    assert filled.verifier_ids().tolist() == [0, 1, 2, 5] and filled.d2t.tolist() == [0, 0, 0, 2]


def test_ties_go_to_the_smaller_id_and_dtypes_are_vllms() -> None:
    kept = select_draft_vocabulary(counts({7: 3, 4: 3, 9: 3}, 10), 2, 10)
    assert kept.verifier_ids().tolist() == [4, 7]
    assert kept.d2t.dtype == torch.int64 and kept.t2d.dtype == torch.bool


def test_sizes_out_of_range_teach() -> None:
    with pytest.raises(ConfigError, match="larger than the verifier's 12") as caught:
        select_draft_vocabulary(counts({}, 12), 13, 12)
    assert caught.value.mend and "12" in caught.value.mend
    with pytest.raises(ConfigError):
        select_draft_vocabulary(counts({}, 12), 0, 12)
    with pytest.raises(DataError, match="beyond"):
        select_draft_vocabulary(counts({13: 1}, 14), 4, 12)


def saved(path: Path, table: torch.Tensor) -> Path:
    np.save(path, table.numpy())
    return path


def test_tables_of_the_user_in_every_form(tmp_path: Path) -> None:
    kept = select_draft_vocabulary(counts({5: 10, 2: 7, 11: 3}, 12), 3, 12)
    offsets = saved(tmp_path / "d2t-3.npy", kept.d2t)
    saved(tmp_path / "t2d-3.npy", kept.t2d)
    both = tmp_path / "tables.safetensors"
    save_file({"d2t": kept.d2t, "t2d": kept.t2d}, both)
    draft = tmp_path / "draft"
    draft.mkdir()
    save_file({"d2t": kept.d2t, "t2d": kept.t2d, "norm.weight": torch.ones(2)}, draft / "model.safetensors")
    alone = tmp_path / "alone"
    alone.mkdir()
    ids, marks = saved(alone / "my-d2t.npy", kept.verifier_ids()[[0, 2, 1]]), saved(alone / "t2d.npy", kept.t2d)
    for path in (offsets, tmp_path / "t2d-3.npy", both, draft, marks, ids):
        found = given_vocabulary(path, 12)
        assert torch.equal(found.d2t, kept.d2t) and torch.equal(found.t2d, kept.t2d), path


@pytest.mark.parametrize(
    ("d2t", "t2d", "says"),
    [
        ([0, 20], None, "out of range"),
        ([3, 2, 1], [2, 5], "given twice|not those"),
        ([5, 4, 4], None, "given twice"),
        ([0, 1], [2, 5], "not those that t2d keeps"),
        ([0, 1, 2], [2, 5], "not those that t2d keeps"),
        ([0, 1], None, "as distances and as ids"),
    ],
)
def test_wrong_tables_are_refused(tmp_path: Path, d2t: list[int], t2d: list[int] | None, says: str) -> None:
    path = tmp_path / "tables.safetensors"
    tables = {"d2t": torch.tensor(d2t)}
    if t2d is not None:
        tables["t2d"] = torch.zeros(12, dtype=torch.bool)
        tables["t2d"][t2d] = True
    save_file(tables, path)
    with pytest.raises(DataError, match=says) as caught:
        given_vocabulary(path, 12)
    assert str(path) in str(caught.value)


def test_what_holds_no_tables(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no draft vocabulary at"):
        given_vocabulary(tmp_path / "nowhere.npy", 12)
    (tmp_path / "ids.txt").write_text("1 2 3")
    with pytest.raises(ConfigError, match=r"neither \.safetensors nor \.npy"):
        given_vocabulary(tmp_path / "ids.txt", 12)
    with pytest.raises(ConfigError, match="which table it is"):
        given_vocabulary(saved(tmp_path / "ids.npy", torch.arange(3)), 12)
    whole = tmp_path / "whole.safetensors"
    save_file({"norm.weight": torch.ones(2)}, whole)
    with pytest.raises(DataError, match="neither d2t nor t2d"):
        given_vocabulary(whole, 12)
    other = tmp_path / "other.safetensors"
    save_file({"t2d": torch.ones(13, dtype=torch.bool)}, other)
    with pytest.raises(DataError, match="a verifier of 13 tokens"):
        given_vocabulary(other, 12)
    np.save(tmp_path / "d2t.npy", np.array([object()]), allow_pickle=True)
    with pytest.raises(DataError, match="not a readable"):
        given_vocabulary(tmp_path / "d2t.npy", 12)


def test_another_size_than_announced_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tables.safetensors"
    kept = select_draft_vocabulary(counts({5: 10, 2: 7}, 12), 2, 12)
    save_file({"d2t": kept.d2t, "t2d": kept.t2d}, path)
    assert given_vocabulary(path, 12, 2).digest == kept.digest
    assert kept.digest != select_draft_vocabulary(counts({5: 10, 3: 7}, 12), 2, 12).digest
    with pytest.raises(ConfigError, match="names 2 tokens, and draft_vocabulary is 3"):
        given_vocabulary(path, 12, 3)
