"""Cells of the matrix: kept as tags of a version, read back, and laid side by side."""

from __future__ import annotations

from speculators_core.lifecycle.matrix import (
    FINGERPRINT_TAG,
    GATE_TAG,
    RUNTIME_TAG,
    Cell,
    Pair,
    build_matrix,
    cell_of,
    cells,
    number_of,
)
from speculators_core.lifecycle.promotion import may_serve

OLD = Pair(verifier_fingerprint="a" * 64, runtime_key="1" * 64, verifier="org/v", vllm="0.31.0")
NEW = Pair(verifier_fingerprint="a" * 64, runtime_key="2" * 64, verifier="org/v", vllm="0.32.0")
TAGS = {
    FINGERPRINT_TAG: OLD.verifier_fingerprint,
    RUNTIME_TAG: OLD.runtime_key,
    GATE_TAG: "pass",
    "draft.digest": "d" * 64,
    "verifier.name": "org/v",
    "vllm.version": "0.31.0",
    "al": "1.6320",
}


def tagged(cell: Cell) -> dict[str, str]:
    return {cell.tag: cell.model_dump_json()}


def may(tags: dict[str, str], pair: Pair) -> bool:
    return may_serve(tags, verifier_fingerprint=pair.verifier_fingerprint, runtime_key=pair.runtime_key)[0]


def test_a_registered_version_has_the_cell_of_its_pair():
    assert cells(TAGS) == (Cell(pair=OLD, outcome="pass", al=1.632),)
    assert cells({}) == ()


def test_an_acceptance_length_that_is_no_number_is_none_and_the_cell_stands():
    for text in ("n/a", "1,63", "", "nan", "inf"):
        assert cells(TAGS | {"al": text}) == (Cell(pair=OLD, outcome="pass"),)
        assert may(TAGS | {"al": text}, OLD)
    assert number_of(None) is None and number_of("1.63") == 1.63


def test_only_a_proven_cell_may_serve_and_each_pair_has_its_own():
    assert may(TAGS, OLD)
    assert not may(TAGS, NEW)
    tested = TAGS | tagged(Cell(pair=NEW, outcome="pass"))
    assert may(tested, OLD) and may(tested, NEW)
    for outcome in ("fail", "inconclusive", None):
        assert not may(TAGS | tagged(Cell(pair=NEW, outcome=outcome)), NEW)
    states = [Cell(pair=NEW, outcome=outcome).state for outcome in ("pass", "fail", "inconclusive", None)]
    assert states == ["proven", "failed", "untested", "untested"]


def test_no_outcome_proves_anything_of_a_server_that_does_not_say_what_it_is():
    silent = NEW.model_copy(update={"runtime_key": "untested:0.32.0"})
    assert not may(TAGS | tagged(Cell(pair=silent, outcome="pass")), silent)
    assert Cell(pair=silent, outcome="pass").state == "untested"


def test_the_pairs_own_cell_outweighs_the_tag_that_anybody_may_edit():
    assert not may(TAGS | tagged(Cell(pair=OLD, outcome="fail")), OLD)


def test_an_unreadable_or_misplaced_cell_proves_nothing():
    good = Cell(pair=NEW, outcome="pass")
    for tags in ({good.tag: "{"}, {good.tag: '{"outcome": "pass"}'}, {"cell.x.y": good.model_dump_json()}):
        assert cell_of(tags, verifier_fingerprint=NEW.verifier_fingerprint, runtime_key=NEW.runtime_key).outcome is None


def test_the_matrix_holds_every_version_against_every_pair():
    versions = {"1": TAGS | tagged(Cell(pair=NEW, outcome="fail", al=1.2)), "2": {**TAGS, GATE_TAG: "inconclusive"}}
    matrix = build_matrix("chat", versions, {"champion": "1"})
    assert [pair.vllm for pair in matrix.pairs] == ["0.31.0", "0.32.0"]
    assert [[cell.state for cell in row.cells] for row in matrix.rows] == [
        ["proven", "failed"],
        ["untested", "untested"],
    ]
    assert matrix.rows[0].aliases == ("champion",)
