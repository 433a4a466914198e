"""What a draft vocabulary covers, on planted counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from speculators_core.data.coverage import FEW_TOKENS, plot, tabulate
from speculators_core.data.rows import RowRecord, RowSet, RowWriter
from speculators_core.data.vocabulary import select_draft_vocabulary

VOCAB = 64


def planted(output: Path, *, validation: int = 1) -> RowSet:
    """Training says token i (64 - i) times; validation says 0 to 31 once, and 40 once; token 50 is never supervised."""
    writer = RowWriter()
    ids = [token for token in range(VOCAB) for _ in range(VOCAB - token)]
    writer.add(RowRecord("a", "chat", "train", "a", (0,)), [50, *ids], [0, *([1] * len(ids))])
    for number in range(validation):
        writer.add(RowRecord(f"b{number}", "code", "validation", "b", (0,)), [*range(32), 40], [1] * 33)
    writer.write(output, [], [], {})
    return RowSet.open(output)


def test_a_size_is_suggested_by_replies_that_chose_nothing(tmp_path: Path) -> None:
    rows = planted(tmp_path)
    table = tabulate(rows, VOCAB, (8, 16, 32, 48), enough=0.96)
    assert [row.size for row in table.sizes] == [8, 16, 32, 48, VOCAB]
    assert [row.unseen for row in table.sizes] == pytest.approx([8 / 33, 16 / 33, 32 / 33, 1.0, 1.0])
    assert table.sizes[0].train == pytest.approx(sum(VOCAB - token for token in range(8)) / (VOCAB * (VOCAB + 1) / 2))
    assert table.sizes[0].by_domain == pytest.approx({"chat": table.sizes[0].train, "code": 8 / 33})
    assert table.suggested == 32 and table.distinct == VOCAB
    assert tabulate(rows, VOCAB, (8,), enough=1.0).suggested == VOCAB
    assert table.caution is not None and "33 tokens" in table.caution
    assert tabulate(planted(tmp_path / "more", validation=FEW_TOKENS // 33 + 1), VOCAB).caution is None


def test_a_given_vocabulary_is_measured_beside_the_sizes(tmp_path: Path) -> None:
    rows = planted(tmp_path)
    given = select_draft_vocabulary(rows.token_counts(VOCAB, "validation"), 33, VOCAB)
    table = tabulate(rows, VOCAB, (8,), given=given)
    assert table.given is not None and table.given.unseen == 1.0 and table.given.size == 33
    plot(table, tmp_path / "coverage.png")
    assert (tmp_path / "coverage.png").read_bytes().startswith(b"\x89PNG")
