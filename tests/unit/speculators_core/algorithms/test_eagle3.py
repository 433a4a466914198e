from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from speculators_core.algorithms._blocks.aux_layers import aux_layers
from speculators_core.algorithms._blocks.unrolled import Drafting
from speculators_core.algorithms.eagle3.build import build
from speculators_core.algorithms.eagle3.config import Eagle3Config
from speculators_core.algorithms.eagle3.model import Eagle3Draft
from speculators_core.algorithms.eagle3.objective import Eagle3Objective
from speculators_core.errors import ConfigError
from speculators_core.types import Aligned
from tests.unit.speculators_core.algorithms.properties import check_that_packed_is_unpacked, gradients
from tests.unit.speculators_core.algorithms.reference import decode, propose, serve
from tests.unit.speculators_core.algorithms.tiny import VOCAB, pack, sample, vocabulary, write_verifier

SHAPES: list[dict[str, Any]] = [
    {},
    {"layers": 2, "style": "qwen3", "norm_output": False},
    {"layers": 2, "norm_before_fc": False, "fc_norm": True, "norm_before_residual": False},
    {"sliding_window": 5, "layers": 3, "full_attention_layers": (1,)},
    {"sliding_window": None, "norm_before_fc": False},
]


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_verifier(tmp_path_factory.mktemp("verifier"))


def made(verifier: Path, *, reduced: bool = True, **knobs: Any) -> tuple[Eagle3Draft, Eagle3Objective]:
    config = Eagle3Config(**knobs)
    model = build(config, verifier, vocabulary() if reduced else None, seed=11)  # type: ignore[arg-type]
    return model, Eagle3Objective(config)


# ------------------------------------------------------------------------------------------------ the unroll


@pytest.mark.parametrize("knobs", SHAPES)
def test_an_unroll_is_what_the_proposer_computes_while_its_drafts_are_accepted(
    verifier: Path, knobs: dict[str, Any]
) -> None:
    model, objective = made(verifier, **knobs)
    aligned = objective.align(sample(23, [(6, 23)]))
    rows, steps = torch.tensor([0, 3, 7, 8, 15]), 4
    documents = torch.zeros(22, dtype=torch.int64)
    with torch.no_grad():
        states = model(aligned.input_ids, aligned.position_ids, aligned.aux_TAH, Drafting(rows, documents), steps)
        for number, row in enumerate(rows.tolist()):
            features = model.join(aligned.aux_TAH[: row + 1])
            for step in range(steps):
                tokens = aligned.input_ids[: row + 1 + step]  # the reply's own tokens: all accepted so far
                positions = aligned.position_ids[: row + 1 + step]
                state = decode(model, tokens, features, positions)[-1:]
                torch.testing.assert_close(states[step][number : number + 1], model.norm(state), rtol=1e-4, atol=1e-5)
                features = torch.cat([features, model.norm(state) if model.config.norm_output else state])


def test_only_drafting_rows_are_computed_to_the_end(verifier: Path) -> None:
    model, objective = made(verifier)
    aligned = objective.align(sample(23, [(6, 23)]))
    rows = torch.tensor([2, 9])
    outputs = model(
        aligned.input_ids, aligned.position_ids, aligned.aux_TAH, Drafting(rows, torch.zeros(22, dtype=torch.int64)), 3
    )
    assert [tuple(out.shape) for out in outputs] == [(2, 32)] * 3


# ---------------------------------------------------------------------------------------- what is supervised


def counted(objective: Eagle3Objective, *rows: Aligned, total: int) -> list[list[int]]:
    return [row.nonzero().squeeze(1).tolist() for row in objective._counted(pack(list(rows), total))]


def test_the_first_token_of_a_reply_is_learned_and_nothing_past_its_end(verifier: Path) -> None:
    _, objective = made(verifier)
    aligned = objective.align(sample(8, [(4, 8)]))
    # Row j holds token j + 1 and is asked for token j + 2 + step: tokens 4..7 from rows 2..5 at step 0.
    assert counted(objective, aligned, total=9) == [[2, 3, 4, 5], [2, 3, 4], [2, 3]]


def test_chains_end_with_their_document(verifier: Path) -> None:
    _, objective = made(verifier)
    first, second = objective.align(sample(6, [(2, 6)])), objective.align(sample(7, [(0, 7)], seed=1))
    together = counted(objective, first, second, total=13)
    alone = counted(objective, first, total=5), counted(objective, second, total=6)
    assert together == [a + [row + 5 for row in b] for a, b in zip(*alone, strict=True)]


def test_compat_counts_by_the_token_that_goes_in(verifier: Path) -> None:
    _, objective = made(verifier, compat=True)
    aligned = objective.align(sample(8, [(4, 8)]))
    assert counted(objective, aligned, total=7) == [[3, 4, 5, 6], [2, 3, 4, 5], [1, 2, 3, 4]]


@pytest.mark.parametrize("knobs", SHAPES)
def test_packed_is_unpacked(verifier: Path, knobs: dict[str, Any]) -> None:
    model, objective = made(verifier, loss={"kl_div": 0.5, "tv": 0.5}, ttt_step_loss_decay=0.7, **knobs)
    check_that_packed_is_unpacked(model, objective)


def test_padding_and_prompts_of_others_change_nothing(verifier: Path) -> None:
    model, objective = made(verifier)
    row = objective.align(sample(14, [(6, 14)]))
    short, long = pack([row], 13), pack([row], 29)
    one = objective.step(model, short, objective.denominators(short)).loss
    two = objective.step(model, long, objective.denominators(long)).loss
    torch.testing.assert_close(one, two)


def test_a_batch_without_replies_has_a_loss_of_zero_and_a_graph(verifier: Path) -> None:
    model, objective = made(verifier, train_lm_head=True)
    batch = pack([objective.align(sample(10, []))], 12)
    result = objective.step(model, batch, objective.denominators(batch).clamp_min(1.0))
    result.loss.backward()  # type: ignore[no-untyped-call]
    assert float(result.loss.detach()) == 0.0 and result.metrics == {}
    assert gradients(model).keys() == {name for name, p in model.named_parameters() if p.requires_grad}
    assert all(float(g.abs().sum()) == 0.0 for g in gradients(model).values())


def test_the_perfect_draft_has_no_loss_and_is_always_right(verifier: Path) -> None:
    """Teacher states fed back as the draft's own: alignment of rows and targets, end to end."""
    model, objective = made(verifier, ttt_steps=2)
    teacher = model.teacher
    assert teacher is not None
    batch = pack([objective.align(sample(14, [(6, 14)]))], 13)
    states = batch.last_TH * torch.rsqrt(batch.last_TH.square().mean(-1, keepdim=True) + teacher.eps) * teacher.norm
    model.forward = lambda ids, pos, aux, drafting, steps: [  # type: ignore[method-assign]
        states[(drafting.rows_R + step).clamp_max(12)] for step in range(steps)
    ]
    with torch.no_grad():
        result = objective.step(model, batch, objective.denominators(batch))
    assert float(result.loss) == pytest.approx(0.0, abs=1e-5)
    assert result.metrics["full_acc_0"].mean == result.metrics["full_acc_1"].mean == 1.0
    assert result.metrics["accept_rate_0"].mean == pytest.approx(1.0, abs=1e-5)


# ------------------------------------------------------------------------------------------ verifier families


@pytest.mark.parametrize(
    ("changes", "formula"),
    [
        ({"model_type": "gemma2", "final_logit_softcapping": 5.0}, lambda z: 5.0 * torch.tanh(z / 5.0)),
        ({"model_type": "granite", "logits_scaling": 8.0}, lambda z: z / 8.0),
        ({}, lambda z: z),
    ],
)
def test_targets_follow_the_verifiers_family(tmp_path: Path, changes: dict[str, Any], formula: Any) -> None:
    directory = write_verifier(tmp_path / "v", **changes)
    model, _ = made(directory, reduced=False)
    teacher = model.teacher
    assert teacher is not None
    last = torch.randn(5, 32)
    weight = teacher.norm.float() + (1.0 if changes.get("model_type") == "gemma2" else 0.0)
    normed = last * torch.rsqrt(last.square().mean(-1, keepdim=True) + 1e-5) * weight
    torch.testing.assert_close(teacher.logits(last, torch.float32), formula(normed @ teacher.head.float().T))


# ------------------------------------------------------------------------------------------------- the walk


@pytest.mark.parametrize("knobs", SHAPES)
@pytest.mark.parametrize("reduced", [True, False])
def test_the_walk_is_the_served_loop(verifier: Path, knobs: dict[str, Any], reduced: bool) -> None:
    model, objective = made(verifier, reduced=reduced, **knobs)
    aligned = objective.align(sample(40, [(5, 19), (24, 39)]))
    ids = aligned.input_ids.clone()
    generator = torch.Generator().manual_seed(0)
    # Make the replies such that some proposals are accepted: write what the draft itself would say, with slips.
    for begin, end in ((4, 18), (23, 38)):
        for at in range(begin + 1, end):
            (token,) = propose(model, replace(aligned, input_ids=ids), at - 1, 1)
            ids[at] = token if torch.rand((), generator=generator) < 0.8 else int(torch.randint(VOCAB, ()))
    aligned = replace(aligned, input_ids=ids)
    walked = objective.walk(model, aligned, 3)
    assert list(walked) == serve(model, aligned, 3)
    assert sum(walked) > 0 and min(walked) < 3


def test_a_row_without_replies_is_not_walked(verifier: Path) -> None:
    model, objective = made(verifier)
    assert objective.walk(model, objective.align(sample(9, [])), 3) == []
    assert objective.walk(model, objective.align(sample(9, [(8, 9)])), 3) == []


# ----------------------------------------------------------------------------------------------- the knobs


def test_frozen_parts_stay_in_bfloat16_and_shared(verifier: Path) -> None:
    model, _ = made(verifier)
    assert model.teacher is not None
    assert model.embed_tokens.weight.dtype == model.lm_head.weight.dtype == torch.bfloat16
    assert model.teacher.head.data_ptr() == model.lm_head.weight.data_ptr()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert all(dict(model.named_parameters())[name].dtype == torch.float32 for name in trained)
    assert not trained & {"embed_tokens.weight", "lm_head.weight", "teacher.head", "teacher.norm"}


def test_a_trained_head_learns_and_leaves_the_teacher_alone(verifier: Path) -> None:
    model, objective = made(verifier, train_lm_head=True)
    assert model.teacher is not None
    assert model.teacher.head.data_ptr() != model.lm_head.weight.data_ptr()
    batch = pack([objective.align(sample(14, [(6, 14)]))], 13)
    objective.step(model, batch, objective.denominators(batch)).loss.backward()  # type: ignore[no-untyped-call]
    assert model.lm_head.weight.grad is not None and float(model.lm_head.weight.grad.abs().sum()) > 0


def test_the_seed_alone_decides_the_weights(verifier: Path) -> None:
    config = Eagle3Config()
    one, two, other = (build(config, verifier, None, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.fc.weight, two.fc.weight) and not torch.equal(one.fc.weight, other.fc.weight)
    assert float(one.fc.weight.detach().std()) == pytest.approx(0.2, rel=0.1)  # the verifier's initializer_range


def test_fresh_logits_are_neither_flat_nor_certain(verifier: Path) -> None:
    fresh, peers = (build(Eagle3Config(compat=compat), verifier, None, seed=1) for compat in (False, True))
    assert torch.equal(peers.norm.weight, torch.ones(32))
    states = torch.randn(64, 32)
    for model, low, high in ((fresh, 0.8, 1.2), (peers, 4.0, 8.0)):
        logits = model.norm(states) @ model.lm_head.weight.float().T
        assert low < float(logits.detach().std()) < high


@pytest.mark.parametrize(
    ("ids", "depth", "expected"),
    [(None, 30, (2, 15, 27)), (None, 4, (1, 2, 3)), (None, 1, (0,)), ((7, 0, 3), 8, (0, 3, 7))],
)
def test_aux_layers(ids: tuple[int, ...] | None, depth: int, expected: tuple[int, ...]) -> None:
    assert aux_layers(Eagle3Config(aux_layers=ids), depth) == expected


@pytest.mark.parametrize("ids", [(0, 8), (-1, 2), (3, 3)])
def test_layers_that_the_verifier_does_not_have_are_refused(ids: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="aux_layers"):
        aux_layers(Eagle3Config(aux_layers=ids), 8)


def test_wrong_knobs_are_refused(verifier: Path) -> None:
    with pytest.raises(ValueError, match="exclude"):
        Eagle3Config(fc_norm=True)
    with pytest.raises(ValueError, match="kl_div"):
        Eagle3Config(loss="kl_dif")
    with pytest.raises(ConfigError, match="full_attention_layers"):
        made(verifier, full_attention_layers=(1,))
    broken = vocabulary()
    with pytest.raises(ConfigError, match="does not fit"):
        build(Eagle3Config(), verifier, type(broken)(broken.d2t + 1, broken.t2d), seed=0)  # type: ignore[arg-type]
