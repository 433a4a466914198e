from __future__ import annotations

from pathlib import Path

import pytest

from speculators_core.bench.algorithms import DraftRow, compare_sides, read_rows, table
from speculators_core.bench.cases import CASES, case, suited
from speculators_core.errors import ConfigError
from speculators_core.registry import names, resolve


def row(side: str, accepted: int, *, seed: int = 0) -> DraftRow:
    counts = tuple((40 + i % 7, accepted + i % 5) for i in range(200))
    return DraftRow.model_validate(
        {
            "case": "eagle3", "side": side, "seed": seed, "optimizer": "adamw", "steps": 10, "tokens": 10_000,
            "peak_memory_mib": 100.0,
            "tokens_per_s": 2000.0 if side == "ours" else 1000.0, "loss": 2.0, "eal": None,
            "al_validation": 1.5, "k": 3, "prompts": 200,
            "al": 1 + sum(a for _, a in counts) / sum(d for d, _ in counts), "low": 1.4, "high": 1.6,
            "per_position": (0.4, 0.2, 0.1), "counts": counts,
        }
    )  # fmt: skip


def test_every_case_is_an_algorithm_of_ours_with_knobs_it_knows() -> None:
    for each in CASES:
        algorithm = resolve(str(each.ours["kind"]))
        knobs = {name: value for name, value in each.ours.items() if name != "kind"}
        algorithm.config.model_validate(knobs)
    with pytest.raises(ConfigError, match="eagle3"):
        case("eagel3")


def test_pairs_are_of_one_seed_and_name_the_ratio() -> None:
    rows = [row("ours", 30), row("peer", 20), row("ours", 30, seed=1)]
    (pair,) = compare_sides(rows)
    assert pair.seed == 0 and pair.speed_ratio == 2.0
    assert pair.al_ratio == pytest.approx(rows[0].al / rows[1].al, abs=1e-4)
    assert pair.al_ratio_low <= pair.al_ratio <= pair.al_ratio_high
    assert "ours / peer, seed 0" in table(rows, [pair])


def test_a_torn_last_row_and_rows_of_another_make_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    assert read_rows(file) == []
    text = row("ours", 30).model_dump_json()
    file.write_text('{"case": "eagle3"}\n' + text + "\n" + text[:40])
    assert read_rows(file) == [row("ours", 30)]


def test_every_algorithm_has_a_case_that_states_of_its_layers_suit() -> None:
    assert {str(each.ours["kind"]) for each in CASES} == set(names())
    assert [each.name for each in suited(False)] == ["mtp"] and len(suited(True)) == len(CASES) - 1
    assert {each.name for each in CASES if each.peer is None} == {"mtp"}
