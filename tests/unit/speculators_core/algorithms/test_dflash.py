from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from speculators_core.algorithms._blocks.block_build import SPREAD
from speculators_core.algorithms._blocks.block_knobs import check_blocks
from speculators_core.algorithms._blocks.block_objective import chance_weights, expected_count, learned_blocks
from speculators_core.algorithms.dflash.build import build
from speculators_core.algorithms.dflash.config import DFlashConfig
from speculators_core.algorithms.dflash.export import export
from speculators_core.algorithms.dflash.model import DFlashDraft
from speculators_core.algorithms.dflash.objective import DFlashObjective
from speculators_core.errors import ConfigError, FormatError
from speculators_core.formats.card import ModelCard
from speculators_core.formats.directory import read_draft, write_draft
from speculators_core.formats.servable import check_servable
from speculators_core.types import Aligned, DraftPlan, ExportedDraft
from tests.unit.speculators_core.algorithms.blocks import fill_in
from tests.unit.speculators_core.algorithms.properties import (
    check_that_packed_is_unpacked,
    check_that_the_walk_is_the_served_loop,
    gradients,
)
from tests.unit.speculators_core.algorithms.tiny import VOCAB, pack, sample, vocabulary, write_verifier

SHAPES: list[dict[str, Any]] = [
    {"layers": 1},
    {"layers": 2, "sliding_window": 6},
    {"layers": 3, "sliding_window": 5, "full_attention_indices": (1,), "sliding_window_non_causal": True},
    {"layers": 2, "sliding_window": None, "sliding_window_non_causal": True},
]


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_verifier(tmp_path_factory.mktemp("verifier"))


def made(verifier: Path, *, reduced: bool = True, **knobs: Any) -> tuple[DFlashDraft, DFlashObjective]:
    config = DFlashConfig(**{"block_size": 5, "mask_token_id": VOCAB - 1, **knobs})
    model = build(config, verifier, vocabulary() if reduced else None, seed=11)  # type: ignore[arg-type]
    if model.mask_embedding is not None:  # nothing like the table's row any more
        torch.nn.init.normal_(model.mask_embedding, std=0.5)
    return model, DFlashObjective(config)


# ------------------------------------------------------------------------- what vLLM's proposer does with the draft


@torch.no_grad()
def propose(model: DFlashDraft, aligned: Aligned, anchor: int, k: int) -> list[int]:
    states = fill_in(model, aligned, anchor, k + 1)[1:]
    tokens = (states @ model.lm_head.weight.to(states.dtype).T).argmax(-1)
    return (tokens if model.d2t is None else tokens + model.d2t[tokens]).tolist()


@pytest.mark.parametrize("knobs", SHAPES)
def test_blocks_are_what_the_proposer_fills_in(verifier: Path, knobs: dict[str, Any]) -> None:
    model, objective = made(verifier, **knobs)
    aligned = objective.align(sample(23, [(6, 23)]))
    batch = pack([aligned], 23)
    learned = learned_blocks(objective.config, batch)
    with torch.no_grad():
        states = model(batch.input_ids, batch.position_ids, batch.aux_TAH, learned.blocks)
        for number, anchor in enumerate(learned.blocks.anchors_M.tolist()):
            expected = fill_in(model, aligned, anchor, 5)
            torch.testing.assert_close(states[number], expected, rtol=1e-4, atol=1e-5)
        skipping = replace(learned.blocks, skip=1)
        torch.testing.assert_close(model(batch.input_ids, batch.position_ids, batch.aux_TAH, skipping), states[:, 1:])


@pytest.mark.parametrize("knobs", SHAPES)
@pytest.mark.parametrize("reduced", [True, False])
def test_the_walk_is_the_served_loop(verifier: Path, knobs: dict[str, Any], reduced: bool) -> None:
    model, objective = made(verifier, reduced=reduced, **knobs)
    check_that_the_walk_is_the_served_loop(model, objective, propose)


def test_a_row_without_replies_is_not_walked(verifier: Path) -> None:
    model, objective = made(verifier)
    assert objective.walk(model, objective.align(sample(9, [])), 3) == []
    assert objective.walk(model, objective.align(sample(9, [(8, 9)])), 3) == []


# ---------------------------------------------------------------------------------------------- what is supervised


def links(objective: DFlashObjective, *rows: Aligned, total: int) -> dict[int, int]:
    learned = learned_blocks(objective.config, pack(list(rows), total))
    counts = learned.counted_SM.sum(dim=0).tolist()
    return {anchor: n for anchor, n in zip(learned.blocks.anchors_M.tolist(), counts, strict=True) if n}


def test_blocks_end_with_their_reply_and_their_document(verifier: Path) -> None:
    _, objective = made(verifier)
    first, second = objective.align(sample(8, [(3, 8)])), objective.align(sample(6, [(0, 3)], seed=1))
    # every reply token but the last is an anchor, and is asked for what is left of its own reply, at most 4 tokens
    assert links(objective, first, second, total=16) == {3: 4, 4: 3, 5: 2, 6: 1, 8: 2, 9: 1}


def test_compat_keeps_away_from_the_rows_end_and_runs_into_the_next_document(verifier: Path) -> None:
    _, objective = made(verifier, compat=True)
    first, second = objective.align(sample(8, [(3, 8)])), objective.align(sample(6, [(0, 3)], seed=1))
    assert links(objective, first, second, total=16) == {3: 4, 4: 4, 5: 4, 6: 4, 7: 3, 8: 2, 9: 1}
    assert links(objective, first, total=8) == {}


def test_more_anchors_than_wanted_are_drawn_and_counted_by_expectation(verifier: Path) -> None:
    _, objective = made(verifier, max_anchors=8)
    batch = pack([objective.align(sample(64, [(4, 60)]))], 64)
    drawn = [learned_blocks(objective.config, batch).blocks.anchors_M for _ in range(2)]
    assert all(anchors.numel() == 8 for anchors in drawn) and not torch.equal(*drawn)
    with torch.no_grad():
        fixed = [learned_blocks(objective.config, batch).blocks.anchors_M for _ in range(2)]
    assert torch.equal(*fixed)
    counts = [float(learned_blocks(objective.config, batch).counted_SM.sum()) for _ in range(300)]
    assert sum(counts) / 300 == pytest.approx(float(expected_count(objective.config, batch)), rel=0.01)


def test_chance_weights_are_the_published_example() -> None:
    losses, counted = torch.tensor([[0.7], [0.2], [1.0]]), torch.ones(3, 1, dtype=torch.bool)
    found = chance_weights(losses, counted, 0.5).squeeze(1)
    torch.testing.assert_close(found, torch.tensor([1.8941656, 1.1458730, 0.4654015]))


@pytest.mark.parametrize("knobs", SHAPES)
@pytest.mark.parametrize("weights", ["dpace", "fixed-exp-decay"])
def test_packed_is_unpacked(verifier: Path, knobs: dict[str, Any], weights: str) -> None:
    model, objective = made(verifier, position_weights=weights, **knobs)
    check_that_packed_is_unpacked(model, objective)


def test_a_batch_without_replies_has_a_loss_of_zero_and_a_graph(verifier: Path) -> None:
    model, objective = made(verifier)
    batch = pack([objective.align(sample(10, []))], 12)
    result = objective.step(model, batch, objective.denominators(batch).clamp_min(1.0))
    result.loss.backward()  # type: ignore[no-untyped-call]
    assert float(result.loss.detach()) == 0.0 and result.metrics == {}
    assert gradients(model).keys() == {name for name, p in model.named_parameters() if p.requires_grad}


def test_the_perfect_draft_has_no_loss_and_is_always_right(verifier: Path) -> None:
    """Teacher states fed back as the draft's own: alignment of slots and targets, end to end."""
    model, objective = made(verifier, loss="kl_div", position_weights="fixed-exp-decay")
    teacher = model.teacher
    assert teacher is not None
    batch = pack([objective.align(sample(14, [(6, 14)]))], 14)
    states = batch.last_TH * torch.rsqrt(batch.last_TH.square().mean(-1, keepdim=True) + teacher.eps) * teacher.norm
    model.forward = lambda input_ids_T, position_ids_T, aux_TAH, blocks: torch.stack(  # type: ignore[method-assign]
        [states[(blocks.anchors_M + link).clamp_max(13)] for link in range(4)], dim=1
    )
    with torch.no_grad():
        result = objective.step(model, batch, objective.denominators(batch))
    assert float(result.loss) == pytest.approx(0.0, abs=1e-5)
    assert result.metrics["full_acc"].mean == 1.0
    assert result.metrics["accept_rate"].mean == pytest.approx(1.0, abs=1e-5)


# ----------------------------------------------------------------------------------------------------- the export


def test_the_mask_has_an_embedding_of_its_own_that_vllm_reads(verifier: Path, tmp_path: Path) -> None:
    model, objective = made(verifier)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert "mask_embedding" in trained and not trained & {"embed_tokens.weight", "lm_head.weight"}
    directory = write_draft(tmp_path / "draft", export(objective.config, model, "org/v"), ModelCard(title="t"))
    assert (directory / "mask_embedding.pt").is_file()
    assert model.mask_embedding is not None
    assert torch.equal(read_draft(directory).tensors["mask_embedding"], model.mask_embedding.detach().bfloat16())
    plain, objective = made(verifier, train_mask_embedding=False)
    directory = write_draft(tmp_path / "draft", export(objective.config, plain, "org/v"), ModelCard(title="t"))
    assert not (directory / "mask_embedding.pt").exists()


@pytest.mark.parametrize("compat", [False, True])
def test_the_last_norm_starts_as_the_one_that_the_head_was_made_for(verifier: Path, compat: bool) -> None:
    model, _ = made(verifier, compat=compat)
    own = load_file(verifier / "model.safetensors")["model.norm.weight"].float()
    assert torch.equal(model.norm.weight, torch.ones_like(own) if compat else own)


def test_a_last_norm_that_would_shout_starts_smaller(tmp_path: Path) -> None:
    """Some families have norms of 50 beside small heads, some have not: what counts is what the logits do."""
    directory = write_verifier(tmp_path / "loud")
    tensors = load_file(directory / "model.safetensors")
    tensors["model.norm.weight"] = 1000 * tensors["model.norm.weight"]
    save_file(tensors, directory / "model.safetensors")
    model, _ = made(directory)
    head = model.lm_head.weight.float()
    assert (head * model.norm.weight.detach()).norm(dim=-1).mean().item() == pytest.approx(SPREAD)


def test_the_verifiers_own_tables_are_left_to_the_verifier(verifier: Path) -> None:
    reduced, objective = made(verifier)
    whole, _ = made(verifier, reduced=False)
    assert {"lm_head.weight", "d2t", "t2d"} <= export(objective.config, reduced, "v").tensors.keys()
    names = export(objective.config, whole, "v").tensors.keys()
    assert not any(name.startswith(("lm_head", "embed_tokens", "teacher", "d2t", "t2d")) for name in names)


def test_what_vllm_would_serve_otherwise_is_refused(verifier: Path) -> None:
    model, objective = made(verifier, **SHAPES[2])
    draft = export(objective.config, model, "v")
    for change, complaint in (
        ({"sliding_window_non_causal": False}, "causally"),
        ({"sample_from_anchor": True}, "masks alone"),
        ({"mask_token_id": VOCAB}, "outside the vocabulary"),
    ):
        with pytest.raises(FormatError, match=complaint):
            check_servable(ExportedDraft({**draft.config, **change}, draft.tensors))


# ------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("knobs", "complaint"),
    [
        ({"full_attention_indices": (0,)}, "sliding_window_non_causal to true"),
        ({"full_attention_indices": (5,)}, "has 5 layers"),
        ({"sliding_window": None}, "sliding_window_non_causal to true"),
        ({"sample_from_anchor": True}, "set it to false"),
        ({"loss": "kl_div"}, "dpace needs loss ce"),
        ({"loss": "kl_dif"}, "kl_div"),
        ({"aux_layers": ()}, "leave it out"),
        ({"markov_rank": 8}, "markov_rank"),
    ],
)
def test_wrong_knobs_are_refused(knobs: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        DFlashConfig(**knobs)


def test_what_does_not_suit_the_recipe_is_refused_before_capture(verifier: Path) -> None:
    plan = DraftPlan(verifier, VOCAB, None, row_tokens=16, allow_unservable=False)
    check_blocks(DFlashConfig(block_size=8, mask_token_id=VOCAB - 1), plan)
    with pytest.raises(ConfigError, match="block_size is 16"):
        check_blocks(DFlashConfig(block_size=16), plan)
    with pytest.raises(ConfigError, match="mask_token_id"):
        check_blocks(DFlashConfig(block_size=8, mask_token_id=VOCAB), plan)


def test_more_is_not_evaluated_than_is_learned(verifier: Path) -> None:
    plan = DraftPlan(verifier, VOCAB, None, row_tokens=64, allow_unservable=False, k=7)
    check_blocks(DFlashConfig(block_size=8), plan)
    with pytest.raises(ConfigError, match=r"evaluation\.k is 7.* learn only 6 tokens"):
        check_blocks(DFlashConfig(block_size=7), plan)
