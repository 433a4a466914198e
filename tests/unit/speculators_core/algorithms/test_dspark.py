from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from speculators_core.algorithms.dspark.build import build
from speculators_core.algorithms.dspark.config import DSparkConfig, check
from speculators_core.algorithms.dspark.export import export
from speculators_core.algorithms.dspark.model import DSparkDraft
from speculators_core.algorithms.dspark.objective import DSparkObjective
from speculators_core.errors import ConfigError, FormatError
from speculators_core.formats.servable import check_servable
from speculators_core.types import Aligned, DraftPlan, ExportedDraft
from tests.unit.speculators_core.algorithms.blocks import fill_in
from tests.unit.speculators_core.algorithms.properties import (
    check_that_packed_is_unpacked,
    check_that_the_walk_is_the_served_loop,
)
from tests.unit.speculators_core.algorithms.tiny import VOCAB, pack, sample, vocabulary, write_verifier

SHAPES: list[dict[str, Any]] = [
    {},
    {"markov_head_type": "gated", "sample_from_anchor": False},
    {"markov_head_type": "rnn", "sliding_window": 6, "layers": 2, "full_attention_indices": (0,)},
    {"markov_rank": 0, "enable_confidence_head": False},
]


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_verifier(tmp_path_factory.mktemp("verifier"))


def made(verifier: Path, *, reduced: bool = True, **knobs: Any) -> tuple[DSparkDraft, DSparkObjective]:
    defaults = {"block_size": 5, "layers": 1, "markov_rank": 6, "mask_token_id": VOCAB - 1}
    config = DSparkConfig(**{**defaults, **knobs})
    model = build(config, verifier, vocabulary() if reduced else None, seed=11)  # type: ignore[arg-type]
    torch.manual_seed(0)
    if model.markov_head is not None:  # loud enough to change what is proposed
        torch.nn.init.normal_(model.markov_head.markov_w1.weight)
    return model, DSparkObjective(config)


@torch.no_grad()
def propose(model: DSparkDraft, aligned: Aligned, anchor: int, k: int) -> list[int]:
    """As vLLM samples: left to right, each token corrected by the one just proposed."""
    first = model.config.first_slot
    states = fill_in(model, aligned, anchor, k + first)
    head = model.lm_head.weight.to(states.dtype)
    kind = model.config.markov_head_type
    previous = int(aligned.input_ids[anchor])
    run = torch.zeros(model.config.markov_rank)
    proposals: list[int] = []
    for slot in range(k + first):
        logits = head @ states[slot]
        if model.markov_head is not None:
            markov = model.markov_head
            embedded = factors = markov.markov_w1.weight[previous]
            if kind == "gated":
                gate = markov.gate_proj(torch.cat([states[slot], embedded]))
                factors = gate.sigmoid() * embedded
            elif kind == "rnn":
                gate, candidate, output = markov.joint_proj(torch.cat([run, embedded, states[slot]])).chunk(3)
                run = gate.sigmoid() * run + (1 - gate.sigmoid()) * candidate.tanh()
                factors = output.tanh()
            logits = logits + markov.markov_w2.weight @ factors
        if slot < first:
            continue
        token = int(logits.argmax())
        previous = token if model.d2t is None else token + int(model.d2t[token])
        proposals.append(previous)
    return proposals


@pytest.mark.parametrize("knobs", SHAPES)
@pytest.mark.parametrize("reduced", [True, False])
def test_the_walk_is_the_served_loop(verifier: Path, knobs: dict[str, Any], reduced: bool) -> None:
    model, objective = made(verifier, reduced=reduced, **knobs)
    check_that_the_walk_is_the_served_loop(model, objective, propose)


@pytest.mark.parametrize("knobs", SHAPES)
def test_packed_is_unpacked(verifier: Path, knobs: dict[str, Any]) -> None:
    model, objective = made(verifier, **knobs)
    check_that_packed_is_unpacked(model, objective)


def test_the_confidence_learns_from_acceptance_and_leaves_it_alone(verifier: Path) -> None:
    """Its target is the chance of acceptance, held constant: the head moves, the target's side does not."""
    model, objective = made(verifier, confidence_head_alpha=0.0)
    louder, other = made(verifier, confidence_head_alpha=5.0)
    batch = pack([objective.align(sample(14, [(6, 14)]))], 14)
    results = []
    for draft, goal in ((model, objective), (louder, other)):
        result = goal.step(draft, batch, goal.denominators(batch))
        result.loss.backward()  # type: ignore[no-untyped-call]
        results.append(result)
    confidence = results[0].metrics["confidence_loss"].sum
    assert results[1].metrics["loss"].sum == pytest.approx(results[0].metrics["loss"].sum + 5.0 * confidence, rel=1e-5)
    assert model.markov_head is not None and louder.markov_head is not None
    torch.testing.assert_close(model.markov_head.markov_w2.weight.grad, louder.markov_head.markov_w2.weight.grad)


def test_a_fresh_head_corrects_next_to_nothing_and_is_drawn_from_the_seed(verifier: Path) -> None:
    config = DSparkConfig(block_size=5, layers=1, markov_rank=6, mask_token_id=VOCAB - 1)
    one, two, other = (build(config, verifier, None, seed=seed) for seed in (1, 1, 2))
    assert one.markov_head is not None and two.markov_head is not None and other.markov_head is not None
    assert torch.equal(one.markov_head.markov_w1.weight, two.markov_head.markov_w1.weight)
    assert not torch.equal(one.markov_head.markov_w1.weight, other.markov_head.markov_w1.weight)
    assert float(one.markov_head.markov_w1.weight.detach().std()) == pytest.approx(0.01, rel=0.2)
    assert float(one.markov_head.markov_w2.weight.detach().abs().max()) <= 6**-0.5


@pytest.mark.parametrize("knobs", SHAPES)
def test_exports_have_the_heads_tensors(verifier: Path, knobs: dict[str, Any]) -> None:
    model, objective = made(verifier, **knobs)
    names = export(objective.config, model, "v").tensors.keys()
    assert any(name.startswith("markov_head.") for name in names) == (objective.config.markov_rank > 0)
    assert any(name.startswith("confidence_head.") for name in names) == objective.config.enable_confidence_head


def test_both_ways_on_sliding_layers_is_told_where_vllm_reads_it(verifier: Path) -> None:
    model, objective = made(verifier, sliding_window_non_causal=True)
    draft = export(objective.config, model, "v")
    assert draft.config["transformer_layer_config"]["is_causal"] is False
    untold = {key: value for key, value in draft.config["transformer_layer_config"].items() if key != "is_causal"}
    with pytest.raises(FormatError, match="is_causal"):
        check_servable(ExportedDraft({**draft.config, "transformer_layer_config": untold}, draft.tensors))
    causal, objective = made(verifier)
    assert "is_causal" not in export(objective.config, causal, "v").config["transformer_layer_config"]


@pytest.mark.parametrize(
    "knobs", [{"markov_head_type": "rnn"}, {"markov_rank": 0, "confidence_head_with_markov": False}]
)
def test_heads_that_vllm_does_not_know_are_refused_unless_asked_for(verifier: Path, knobs: dict[str, Any]) -> None:
    config = DSparkConfig(mask_token_id=VOCAB - 1, **knobs)
    plan = DraftPlan(verifier, VOCAB, None, row_tokens=64, allow_unservable=False)
    with pytest.raises(ConfigError, match="allow_unservable"):
        check(config, plan)
    check(config, replace(plan, allow_unservable=True))


def test_wrong_knobs_are_refused() -> None:
    with pytest.raises(ValueError, match="set it to false"):
        DSparkConfig(markov_rank=0)
    with pytest.raises(ValueError, match="no layer slides"):
        DSparkConfig(sliding_window=None, sliding_window_non_causal=True)
