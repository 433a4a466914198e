"""What cannot be learned or served is refused before capture: by an algorithm's `check`, or by the prepared rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from speculators_core import registry
from speculators_core.config import load_recipe
from speculators_core.data.rows import RowRecord, RowSet, RowWriter
from speculators_core.errors import ConfigError, DataError
from speculators_core.preflight import check_rows
from speculators_core.types import DraftPlan, Split
from tests.environment import ROOT
from tests.unit.speculators_core.algorithms.native_heads import write_native_verifier
from tests.unit.speculators_core.algorithms.tiny import VOCAB, write_verifier

BLOCKS = [name for name in registry.names() if "block_size" in registry.resolve(name).config.model_fields]
CHAINS = {"num_depths": "peagle", "num_speculative_steps": "mtp"}


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> DraftPlan:
    verifier = write_native_verifier(tmp_path_factory.mktemp("verifier"), "mimo")
    return DraftPlan(verifier, VOCAB, None, row_tokens=64, allow_unservable=True)


def refused(plan: DraftPlan, kind: str, says: str, **knobs: Any) -> None:
    algorithm = registry.resolve(kind)
    with pytest.raises(ConfigError, match=says) as caught:
        algorithm.check(algorithm.config(**knobs), plan)
    assert caught.value.mend


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_block_must_fit_into_a_row(plan: DraftPlan, kind: str) -> None:
    refused(plan, kind, "no block would fit", block_size=64)
    fitting = registry.resolve(kind).config.model_validate({"block_size": 8})
    registry.resolve(kind).check(fitting, plan)


@pytest.mark.parametrize(("knob", "kind"), CHAINS.items())
def test_a_chain_must_fit_into_a_row(plan: DraftPlan, knob: str, kind: str) -> None:
    refused(replace(plan, row_tokens=9), kind, "too short for chains", **{knob: 9})


@pytest.mark.parametrize("kind", [*BLOCKS, "peagle"])
def test_a_mask_token_must_be_one_of_the_verifiers(plan: DraftPlan, kind: str) -> None:
    refused(plan, kind, "outside the verifier's vocabulary", mask_token_id=VOCAB)


@pytest.mark.parametrize("kind", ["mtp", "dflash2"])
def test_some_propose_from_the_whole_vocabulary_only(plan: DraftPlan, kind: str) -> None:
    refused(replace(plan, draft_vocabulary=VOCAB // 2), kind, "draft_vocabulary|vocabulary")


@pytest.mark.parametrize(
    ("kind", "knobs"),
    [
        ("dspark", {"markov_head_type": "gated"}),
        ("dspark", {"markov_head_type": "rnn"}),
        ("dspark", {"markov_rank": 0, "confidence_head_with_markov": False}),
        ("xpress", {}),
    ],
)
def test_heads_that_the_runtime_has_no_loader_for(plan: DraftPlan, kind: str, knobs: dict[str, Any]) -> None:
    algorithm = registry.resolve(kind)
    algorithm.check(algorithm.config(**knobs), plan)
    refused(replace(plan, allow_unservable=False), kind, "vLLM", **knobs)


def test_an_algorithm_that_trains_the_verifiers_own_head_needs_one(plan: DraftPlan, tmp_path: Path) -> None:
    refused(replace(plan, verifier_dir=write_verifier(tmp_path)), "mtp", "own multi-token head")


def prepared(directory: Path, *rows: tuple[list[int], list[int]]) -> RowSet:
    """Training rows of (ids, mask), and one to validate with."""
    writer = RowWriter()
    for number, (ids, mask) in enumerate([*rows, rows[0]]):
        split: Split = "train" if number < len(rows) else "validation"
        writer.add(RowRecord(str(number), "all", split, str(number), (1,)), ids, mask)
    writer.write(directory, [], [], {})
    return RowSet.open(directory)


def suits(plan: DraftPlan, kind: str, rows: RowSet, **knobs: Any) -> None:
    recipe = load_recipe(ROOT / "deployments" / "recipes" / "demo.yaml", [f"training.row_tokens={plan.row_tokens}"])
    check_rows(recipe.model_copy(update={"algorithm": {"kind": kind, **knobs}}), plan.verifier_dir, rows)


@pytest.mark.parametrize("kind", [*BLOCKS, "peagle"])
def test_a_mask_token_that_the_data_holds(plan: DraftPlan, kind: str, tmp_path: Path) -> None:
    rows = prepared(tmp_path, ([5, 6, 7, 8], [0, 0, 1, 1]), ([9, 7, 8, 7], [0, 1, 1, 1]))
    suits(plan, kind, rows, mask_token_id=4)
    for held, times in ((5, 2), (7, 4)):  # in a prompt, and in replies
        with pytest.raises(ConfigError, match=f"token {held} .* {times} times") as caught:
            suits(plan, kind, rows, mask_token_id=held)
        assert "algorithm.mask_token_id" in str(caught.value.mend)


@pytest.mark.parametrize("kind", registry.names())
def test_rows_of_which_none_can_be_learned(plan: DraftPlan, kind: str, tmp_path: Path) -> None:
    far = [0] * (plan.row_tokens + 2)  # replies that begin behind a packed row's end, shifted or not
    nowhere = prepared(tmp_path / "nowhere", ([5] * 69, [*far, 1, 1, 1]), ([5] * 68, [*far, 1, 1]))
    with pytest.raises(DataError, match=r"nothing to learn.* 2 training rows.*row_tokens = 64") as caught:
        suits(plan, kind, nowhere)
    assert "training.row_tokens" in str(caught.value.mend)
    suits(plan, kind, prepared(tmp_path / "there", ([5] * 68, [*far, 1, 1]), ([5] * 6, [0, 0, 1, 1, 1, 1])))


@pytest.mark.parametrize("kind", BLOCKS)
def test_rows_without_an_anchor(plan: DraftPlan, kind: str, tmp_path: Path) -> None:
    single = prepared(tmp_path, ([5, 6, 7, 8], [0, 0, 0, 1]), ([5, 6, 7, 8], [0, 1, 0, 1]))
    with pytest.raises(DataError, match="nothing to learn"):
        suits(plan, kind, single)
