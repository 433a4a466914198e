"""Draft vocabularies, against the golden vectors of tests/fixtures/numeric/README.md."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from speculators_core.data.vocabulary import load_draft_vocabulary, select_draft_vocabulary
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


def test_tables_of_the_user(tmp_path: Path) -> None:
    kept = select_draft_vocabulary(counts({5: 10, 2: 7}, 12), 2, 12)
    d2t, t2d = tmp_path / "d2t.npy", tmp_path / "t2d.npy"
    np.save(d2t, kept.d2t.numpy())
    np.save(t2d, kept.t2d.numpy())
    loaded = load_draft_vocabulary(d2t, t2d, 12)
    assert torch.equal(loaded.d2t, kept.d2t) and torch.equal(loaded.t2d, kept.t2d)
    np.save(d2t, kept.verifier_ids().numpy())
    with pytest.raises(DataError, match="disagree") as caught:
        load_draft_vocabulary(d2t, t2d, 12)
    assert caught.value.mend and "offsets" in caught.value.mend
    np.save(d2t, np.array([object()]), allow_pickle=True)
    with pytest.raises(DataError, match="not a readable"):
        load_draft_vocabulary(d2t, t2d, 12)
