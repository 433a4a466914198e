"""What a recipe may not ask of an algorithm is refused by its `check`, which needs no engine: before capture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from speculators_core import registry
from speculators_core.errors import ConfigError
from speculators_core.types import DraftPlan
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
