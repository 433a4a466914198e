from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from speculators_core.algorithms.xpress.build import build
from speculators_core.algorithms.xpress.config import XPressConfig, check
from speculators_core.algorithms.xpress.export import export
from speculators_core.algorithms.xpress.model import XPressDraft
from speculators_core.algorithms.xpress.objective import XPressObjective
from speculators_core.errors import ConfigError
from speculators_core.types import Aligned, DraftPlan
from tests.unit.speculators_core.algorithms.blocks import fill_in
from tests.unit.speculators_core.algorithms.properties import (
    check_that_packed_is_unpacked,
    check_that_the_walk_is_the_served_loop,
)
from tests.unit.speculators_core.algorithms.tiny import VOCAB, pack, sample, vocabulary, write_verifier


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_verifier(tmp_path_factory.mktemp("verifier"))


def made(verifier: Path, *, reduced: bool = True, **knobs: Any) -> tuple[XPressDraft, XPressObjective]:
    config = XPressConfig(**{"block_size": 5, "layers": 1, "xpress_rank": 6, "mask_token_id": VOCAB - 1, **knobs})
    model = build(config, verifier, vocabulary() if reduced else None, seed=11)  # type: ignore[arg-type]
    torch.manual_seed(0)
    for parameter in model.refiner_head.parameters():  # loud enough to change what is proposed
        torch.nn.init.normal_(parameter, std=0.5)
    return model, XPressObjective(config)


@torch.no_grad()
def propose(model: XPressDraft, aligned: Aligned, anchor: int, k: int) -> list[int]:
    """Rounds of refinement over one block, slot by slot, from the backbone's own tokens."""
    config, head = model.config, model.refiner_head
    states = fill_in(model, aligned, anchor, config.block_size)
    base = states @ model.lm_head.weight.to(states.dtype).T
    first = config.first_slot

    def tokens(logits: torch.Tensor) -> list[int]:
        best = logits.argmax(-1)
        return (best if model.d2t is None else best + model.d2t[best]).tolist()

    said = tokens(base)
    here = int(aligned.input_ids[anchor])
    before = int(aligned.input_ids[max(anchor - 1, 0)])
    for _ in range(config.num_jacobi_passes):
        previous = [here, *said[:-1]] if first == 0 else [before, here, *said[1:-1]]
        parts = [
            head.in_proj.weight
            @ torch.cat(
                [head.down_h.weight @ state, head.down_g.weight @ states.mean(0), head.token_embed.weight[token]]
            )
            for state, token in zip(states, previous, strict=True)
        ]
        mixed = [
            part + torch.stack([head.mix_l[:, slot, j] * parts[j] for j in range(slot + 1)]).sum(0)
            for slot, part in enumerate(parts)
        ]
        bias = []
        for u in mixed:
            gated = functional.silu(head.mlp_gate.weight @ u) * (head.mlp_up.weight @ u)
            bias.append(head.readout.weight @ (u + head.mlp_down.weight @ gated))
        said = tokens(base + torch.stack(bias))
    return said[first:][:k]


@pytest.mark.parametrize("knobs", [{}, {"sample_from_anchor": True, "num_jacobi_passes": 2}])
@pytest.mark.parametrize("reduced", [True, False])
def test_the_walk_is_the_served_loop(verifier: Path, knobs: dict[str, Any], reduced: bool) -> None:
    model, objective = made(verifier, reduced=reduced, **knobs)
    check_that_the_walk_is_the_served_loop(model, objective, propose)


def test_more_is_not_proposed_than_a_block_holds(verifier: Path) -> None:
    model, objective = made(verifier)
    aligned = objective.align(sample(30, [(5, 30)]))
    assert max(objective.walk(model, aligned, 9)) <= 4


@pytest.mark.parametrize(
    "knobs", [{}, {"consistency_weight": 0.0}, {"base_anchor_weight": 0.0}, {"base_anchor_full_weight": True}]
)
def test_packed_is_unpacked(verifier: Path, knobs: dict[str, Any]) -> None:
    model, objective = made(verifier, **knobs)
    check_that_packed_is_unpacked(model, objective)


def test_the_loss_is_the_sum_of_its_parts(verifier: Path) -> None:
    model, objective = made(verifier, consistency_weight=0.4, base_anchor_weight=0.7)
    batch = pack([objective.align(sample(20, [(6, 20)]))], 20)
    result = objective.step(model, batch, objective.denominators(batch))
    means = {name: value.mean for name, value in result.metrics.items()}
    parts = means["tf_loss"] + 0.4 * means["consistency_loss"] + 0.7 * means["base_anchor_loss"]
    assert means["loss"] == pytest.approx(parts, rel=1e-5)
    assert means["tf_loss"] == pytest.approx(0.1 * means["ce_loss"] + 0.9 * means["tv_loss"], rel=1e-5)
    result.loss.backward()  # type: ignore[no-untyped-call]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and float(parameter.grad.abs().sum()) > 0, name


def test_it_is_exported_in_its_format(verifier: Path) -> None:
    model, objective = made(verifier)
    draft = export(objective.config, model, "v")
    assert draft.tensors["refiner_head.mix_l"].shape == (6, 5, 5)
    assert draft.config["num_jacobi_passes"] == 6


def test_what_nothing_can_serve_is_refused_unless_asked_for(verifier: Path) -> None:
    config = XPressConfig(mask_token_id=VOCAB - 1)
    plan = DraftPlan(verifier, VOCAB, None, row_tokens=64, allow_unservable=False)
    with pytest.raises(ConfigError, match="no loader"):
        check(config, plan)
    allowed = replace(plan, allow_unservable=True)
    check(config, allowed)
    with pytest.raises(ConfigError, match="ce_from_data"):
        check(XPressConfig(mask_token_id=VOCAB - 1, ce_from_data=True), replace(allowed, draft_vocabulary=40))
    with pytest.raises(ValueError, match="has no ce"):
        XPressConfig(loss="tv", ce_from_data=True)
