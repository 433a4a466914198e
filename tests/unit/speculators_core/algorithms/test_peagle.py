from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from speculators_core.algorithms._blocks import attention
from speculators_core.algorithms.peagle.build import build, check
from speculators_core.algorithms.peagle.config import PEagleConfig
from speculators_core.algorithms.peagle.elements import countable, draw_elements, every_depth
from speculators_core.algorithms.peagle.export import export
from speculators_core.algorithms.peagle.model import PEagleDraft
from speculators_core.algorithms.peagle.objective import PEagleObjective
from speculators_core.algorithms.peagle.proposer import draft_logits, served_config
from speculators_core.config import validate
from speculators_core.errors import ConfigError, FormatError
from speculators_core.formats.servable import check_servable
from speculators_core.types import Batch, DraftContext, DraftPlan, ExportedDraft
from tests.unit.speculators_core.algorithms.properties import check_that_packed_is_unpacked, gradients
from tests.unit.speculators_core.algorithms.reference import decode, propose_in_parallel, serve
from tests.unit.speculators_core.algorithms.tiny import VOCAB, pack, sample, vocabulary, write_verifier

FIXTURES = Path(__file__).parents[3] / "fixtures"
SHAPES: list[dict[str, Any]] = [
    {},
    {"layers": 2, "style": "qwen3"},
    {"layers": 3, "norm_before_fc": False, "fc_norm": True, "norm_before_residual": False},
    {"sliding_window": 5, "layers": 3, "full_attention_layers": (1,)},
    {"sliding_window": 4, "norm_before_fc": False},
]
EVERY_CHAIN: dict[str, Any] = {"down_sample_ratio": 1.0}
"""Nothing is left to chance: all depths of all rows."""


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_verifier(tmp_path_factory.mktemp("verifier"))


def made(verifier: Path, *, reduced: bool = True, **knobs: Any) -> tuple[PEagleDraft, PEagleObjective]:
    config = PEagleConfig(**{"num_depths": 4, **knobs})
    model = build(config, verifier, vocabulary() if reduced else None, seed=11)  # type: ignore[arg-type]
    return model, PEagleObjective(config)


# ------------------------------------------------------------------------------------------------ the pass


@pytest.mark.parametrize("block", [5, 128])
@pytest.mark.parametrize("knobs", SHAPES)
def test_the_pass_is_what_the_engine_computes_at_every_row(
    verifier: Path, knobs: dict[str, Any], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "BLOCK", block)
    model, objective = made(verifier, **knobs)
    aligned = objective.align(sample(23, [(6, 23)]))
    documents = torch.zeros(22, dtype=torch.int64)
    drawn = draw_elements(objective.config, pack([aligned], 22))
    rows = torch.tensor([0, 3, 7, 8, 15])
    with torch.no_grad():
        for elements in (every_depth(rows, documents, 4), drawn):
            states = model(aligned.input_ids, aligned.position_ids, aligned.aux_TAH, elements)
            for depth, anchors in enumerate(elements.anchors):
                assert states[depth].shape == (anchors.numel(), 32)
                for number, row in enumerate(anchors.tolist()):
                    tokens = torch.cat([aligned.input_ids[: row + 1], torch.full((depth,), model.mask_token_id)])
                    aux = torch.cat([aligned.aux_TAH[: row + 1], model.mask_hidden[0].expand(depth, -1)])
                    state = decode(model, tokens, model.join(aux), torch.arange(row + 1 + depth))[-1:]
                    torch.testing.assert_close(states[depth][number][None], model.norm(state), rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------------- the draw


def long_batch() -> Batch:
    objective = PEagleObjective(PEagleConfig())
    rows = [objective.align(sample(n, [(0, n // 2), (n // 2 + 3, n)], seed=n)) for n in (301, 150, 77)]
    return pack(rows, 540)


@pytest.mark.parametrize("compat", [False, True])
def test_chains_have_no_holes_and_lie_in_their_row(compat: bool) -> None:
    config, batch = PEagleConfig(num_depths=6, compat=compat), long_batch()
    allowed = countable(config, batch)
    elements = draw_elements(config, batch)
    assert len(elements.anchors) == 6
    for depth, anchors in enumerate(elements.anchors):
        assert anchors.tolist() == sorted(set(anchors.tolist()))
        assert int(anchors.min()) >= 0 and int(anchors.max()) + depth < 540
        if depth:
            assert bool(allowed[depth][anchors].all())
        if depth > 1:
            assert set(anchors.tolist()) <= set(elements.anchors[depth - 1].tolist())
    # the first token of a row is supervised: no chain starts before it
    assert bool(batch.loss_mask[0])


def test_shares_fall_to_their_floor_and_do_not_depend_on_the_draw() -> None:
    config, batch = PEagleConfig(num_depths=8), long_batch()
    numbers = countable(config, batch).sum(dim=1).tolist()
    expected = [max(0.7**depth, 0.2) for depth in range(8)]
    objective = PEagleObjective(config)
    draws = [draw_elements(config, batch) for _ in range(3)]
    for elements in draws:
        counts = [int(counted.sum()) for counted in elements.counted]
        assert counts == [int(number * share) for number, share in zip(numbers, expected, strict=True)]
        assert float(objective.denominators(batch)[0]) == sum(counts)
    assert not torch.equal(draws[0].anchors[1], draws[1].anchors[1])
    few = draw_elements(PEagleConfig(num_depths=3, max_anchors=10), batch)
    assert [int(counted.sum()) for counted in few.counted] == [numbers[0], 7, 4]


def test_every_row_has_the_same_chance() -> None:
    config, batch = PEagleConfig(num_depths=3), long_batch()
    torch.manual_seed(0)
    times = torch.zeros(540)
    for _ in range(200):
        times[draw_elements(config, batch).anchors[1]] += 1
    inner = countable(config, batch)[2]  # rows whose chain reaches the last depth
    assert float(times[inner].min()) > 90 and float(times[inner].max()) < 190
    assert float(times[inner].mean()) == pytest.approx(140, abs=5)


def test_only_what_the_verifier_wrote_in_one_document_is_learned() -> None:
    objective = PEagleObjective(PEagleConfig(num_depths=3))
    first, second = objective.align(sample(8, [(4, 8)])), objective.align(sample(7, [(0, 7)], seed=1))
    found = [row.nonzero().squeeze(1).tolist() for row in countable(objective.config, pack([first, second], 15))]
    # Row j holds token j + 1 and is asked, at depth d, for token j + 2 + d: tokens 4..7 from rows 2..5 at depth 0.
    assert found == [[2, 3, 4, 5, 7, 8, 9, 10, 11], [2, 3, 4, 7, 8, 9, 10], [2, 3, 7, 8, 9]]


def test_compat_counts_by_the_token_that_goes_in_and_runs_into_the_next_document() -> None:
    objective = PEagleObjective(PEagleConfig(num_depths=3, compat=True))
    first, second = objective.align(sample(8, [(4, 8)])), objective.align(sample(7, [(0, 7)], seed=1))
    found = [row.nonzero().squeeze(1).tolist() for row in countable(objective.config, pack([first, second], 15))]
    assert found == [list(range(3, 13)), list(range(2, 12)), list(range(2, 11))]


# -------------------------------------------------------------------------------------------- what is learned


@pytest.mark.parametrize("knobs", SHAPES)
def test_packed_is_unpacked(verifier: Path, knobs: dict[str, Any]) -> None:
    model, objective = made(verifier, loss={"kl_div": 0.5, "tv": 0.5}, **EVERY_CHAIN, **knobs)
    check_that_packed_is_unpacked(model, objective)


def test_metrics_pool_to_means_over_the_elements(verifier: Path) -> None:
    model, objective = made(verifier, **EVERY_CHAIN)
    batch = pack([objective.align(sample(30, [(6, 30)]))], 29)
    with torch.no_grad():
        result = objective.step(model, batch, objective.denominators(batch))
    counts = [result.metrics[f"loss_{depth}"].count for depth in range(4)]
    assert counts == countable(objective.config, batch).sum(dim=1).tolist()
    total = sum(result.metrics[f"loss_{depth}"].sum for depth in range(4))
    assert total / sum(counts) == pytest.approx(float(result.loss), rel=1e-5)
    assert "eal" not in result.metrics
    assert {f"full_acc_{k}" for k in range(4)} | {f"accept_rate_{k}" for k in range(4)} <= set(result.metrics)


def test_padding_changes_nothing(verifier: Path) -> None:
    model, objective = made(verifier, **EVERY_CHAIN)
    row = objective.align(sample(14, [(6, 14)]))
    short, long = pack([row], 13), pack([row], 29)
    one = objective.step(model, short, objective.denominators(short)).loss
    two = objective.step(model, long, objective.denominators(long)).loss
    assert bool(torch.isfinite(one))
    torch.testing.assert_close(one, two)


@pytest.mark.parametrize("mask", [[], [(9, 10)]])
def test_every_trained_parameter_is_in_every_graph(verifier: Path, mask: list[tuple[int, int]]) -> None:
    """The reduction over ranks waits for each, also where a batch has no reply, or none that is worth a chain."""
    model, objective = made(verifier, train_lm_head=True)
    batch = pack([objective.align(sample(10, mask))], 12)
    result = objective.step(model, batch, objective.denominators(batch).clamp_min(1.0))
    result.loss.backward()  # type: ignore[no-untyped-call]
    assert gradients(model).keys() == {name for name, p in model.named_parameters() if p.requires_grad}
    if not mask:
        assert float(result.loss.detach()) == 0.0 and result.metrics == {}


def test_embedding_and_mask_are_trained_and_the_head_is_not(verifier: Path) -> None:
    model, objective = made(verifier, reduced=False)
    teacher = model.teacher
    assert teacher is not None
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {"embed_tokens.weight", "mask_hidden"} <= trained and not {"lm_head.weight", "teacher.head"} & trained
    assert model.embed_tokens.weight.dtype == torch.float32 and model.lm_head.weight.dtype == torch.bfloat16
    batch = pack([objective.align(sample(14, [(6, 14)]))], 13)
    objective.step(model, batch, objective.denominators(batch)).loss.backward()  # type: ignore[no-untyped-call]
    touched = gradients(model)["embed_tokens.weight"].abs().sum(dim=1).nonzero().squeeze(1).tolist()
    assert model.mask_token_id in touched
    assert set(touched) <= {*batch.input_ids.tolist(), model.mask_token_id}
    assert float(gradients(model)["mask_hidden"].abs().sum()) > 0


def test_the_perfect_draft_has_no_loss_and_is_always_right(verifier: Path) -> None:
    model, objective = made(verifier)
    teacher = model.teacher
    assert teacher is not None
    batch = pack([objective.align(sample(14, [(6, 14)]))], 13)
    states = batch.last_TH * torch.rsqrt(batch.last_TH.square().mean(-1, keepdim=True) + teacher.eps) * teacher.norm
    model.forward = lambda ids, pos, aux, elements: [  # type: ignore[method-assign,assignment]
        states[(anchors + depth).clamp_max(12)] for depth, anchors in enumerate(elements.anchors)
    ]
    with torch.no_grad():
        result = objective.step(model, batch, objective.denominators(batch))
    assert float(result.loss) == pytest.approx(0.0, abs=1e-5)
    assert all(result.metrics[f"full_acc_{k}"].mean == 1.0 for k in range(3))
    assert result.metrics["accept_rate_1"].mean == pytest.approx(1.0, abs=1e-5)


# ------------------------------------------------------------------------------------------------- the walk


@pytest.mark.parametrize("knobs", SHAPES)
@pytest.mark.parametrize("reduced", [True, False])
def test_the_walk_is_the_served_loop(verifier: Path, knobs: dict[str, Any], reduced: bool) -> None:
    model, objective = made(verifier, reduced=reduced, **knobs)
    aligned = objective.align(sample(40, [(5, 19), (24, 39)]))
    ids = aligned.input_ids.clone()
    generator = torch.Generator().manual_seed(0)
    # make the replies such that some proposals are accepted: write what the draft itself would say, with slips
    for begin, end in ((4, 18), (23, 38)):
        at = begin + 1
        while at < end:
            for token in propose_in_parallel(model, replace(aligned, input_ids=ids), at - 1, 3)[: end - at]:
                ids[at] = token if torch.rand((), generator=generator) < 0.8 else int(torch.randint(VOCAB, ()))
                at += 1
    aligned = replace(aligned, input_ids=ids)
    walked = objective.walk(model, aligned, 3)
    assert list(walked) == serve(model, aligned, 3, propose_in_parallel)
    assert sum(walked) > 0 and min(walked) < 3
    assert objective.walk(model, objective.align(sample(9, [])), 3) == []


# ----------------------------------------------------------------------------------------------- the export


def test_the_exported_directory_is_the_formats(tmp_path: Path) -> None:
    verifier = write_verifier(tmp_path, architectures=["Qwen3ForCausalLM"])
    model, objective = made(verifier, style="qwen3", norm_before_fc=False, num_depths=8)
    draft = export(objective.config, model, "org/verifier")
    golden = json.loads((FIXTURES / "peagle_qwen3_128.config.json").read_text())
    assert set(draft.config) == set(golden) - {"auto_map"}
    same = (
        "architectures", "speculators_model_type", "embed_requires_grad", "tie_word_embeddings", "target_hidden_size",
    )  # fmt: skip
    assert {key: draft.config[key] for key in same} == {key: golden[key] for key in same}
    ours, theirs = (config["speculators_config"] for config in (draft.config, golden))
    assert ours["proposal_methods"] == theirs["proposal_methods"] and ours["algorithm"] == theirs["algorithm"]
    names = {line.split("\t")[0] for line in (FIXTURES / "peagle_qwen3_128.tensors.txt").read_text().splitlines()}
    assert set(draft.tensors) == names
    assert draft.config["mask_token_id"] == model.mask_token_id
    assert draft.tensors["mask_hidden"].shape == (1, 1, 96) and draft.tensors["mask_hidden"].dtype == torch.bfloat16


def test_what_the_engine_would_trip_over_is_refused(verifier: Path) -> None:
    model, objective = made(verifier, norm_before_fc=False, fc_norm=True)
    draft = export(objective.config, model, "org/verifier")
    layers = dict(draft.config["transformer_layer_config"])
    assert layers["fc_norm"] is True
    del layers["fc_norm"]
    with pytest.raises(FormatError, match="fc_norm"):
        check_servable(ExportedDraft({**draft.config, "transformer_layer_config": layers}, draft.tensors))
    silent = {name: tensor for name, tensor in draft.tensors.items() if name != "mask_hidden"}
    with pytest.raises(FormatError, match="mask_hidden is missing"):
        check_servable(ExportedDraft(draft.config, silent))
    with pytest.raises(FormatError, match="mask_token_id 96 lies outside"):
        check_servable(ExportedDraft({**draft.config, "mask_token_id": VOCAB}, draft.tensors))


@pytest.mark.parametrize("knobs", SHAPES)
def test_the_proposer_proposes_what_the_engine_computes(verifier: Path, knobs: dict[str, Any]) -> None:
    model, objective = made(verifier, **knobs)
    served = export(objective.config, model, "org/verifier")
    config = served_config(ExportedDraft(json.loads(json.dumps(served.config)), served.tensors))
    told = objective.config.model_copy(
        update={"speculative_tokens": 4, "mask_token_id": 2, "aux_layers": (2, 4, 5), "intermediate_size": 48}
    )
    assert config == told
    aligned = objective.align(sample(12, []))
    context = DraftContext(aligned.input_ids, aligned.aux_TAH.bfloat16())
    aligned = replace(aligned, aux_TAH=context.aux_TAH.float())
    logits = draft_logits(model, context, 4, lambda place, logits_V: 0)
    assert logits.shape == (4, VOCAB) and bool(torch.isinf(logits).any())
    assert logits.argmax(-1).tolist() == propose_in_parallel(model, aligned, 10, 4)


# ----------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"speculative_tokens": 5, "num_depths": 4}, ["speculative_tokens", "num_depths", "raise num_depths"]),
        ({"sliding_window": 3, "num_depths": 4}, ["sliding_window", "num_depths", "widen"]),
        ({"ttt_steps": 3}, ["ttt_steps", "no key"]),
        ({"norm_output": True}, ["norm_output", "no key"]),
        ({"down_sample_ratio": 1.5}, ["down_sample_ratio"]),
        ({"num_depths": 0}, ["num_depths"]),
        ({"loss": "kl_dif"}, ["`loss`", "kl_div"]),
        ({"fc_norm": True}, ["exclude each other"]),
    ],
)
def test_wrong_knobs_are_named_with_the_mend(knobs: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(PEagleConfig, {"kind": "peagle", **knobs}, where="algorithm")
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("knobs", "row_tokens", "field"),
    [({"mask_token_id": VOCAB}, 64, "mask_token_id"), ({"num_depths": 8}, 8, r"training\.row_tokens")],
)
def test_what_does_not_fit_is_refused_before_capture(
    verifier: Path, knobs: dict[str, Any], row_tokens: int, field: str
) -> None:
    with pytest.raises(ConfigError, match=field):
        check(PEagleConfig(**knobs), DraftPlan(verifier, VOCAB, None, row_tokens, False))


def test_more_is_not_evaluated_than_is_learned(verifier: Path) -> None:
    plan = DraftPlan(verifier, VOCAB, None, row_tokens=64, allow_unservable=False, k=4)
    check(PEagleConfig(num_depths=4), plan)
    with pytest.raises(ConfigError, match=r"evaluation\.k is 4"):
        check(PEagleConfig(num_depths=3), plan)
