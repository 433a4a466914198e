"""A recording is planted by ordinary decoder loops; the replay must agree with it, and name what was changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hs_connectors.probe import ProbedBatch, step_name
from speculators_core import registry
from speculators_core.algorithms._blocks.block_draft import BlockDraft
from speculators_core.algorithms.eagle3.build import build
from speculators_core.algorithms.eagle3.model import Eagle3Draft
from speculators_core.algorithms.eagle3.proposer import served_config
from speculators_core.errors import EvaluationError, FormatError
from speculators_core.evaluation.parity_logits import replay
from speculators_core.formats.card import ModelCard
from speculators_core.formats.directory import read_draft, write_draft
from speculators_core.types import Aligned
from tests.unit.speculators_core.algorithms.blocks import fill_in
from tests.unit.speculators_core.algorithms.reference import decode
from tests.unit.speculators_core.algorithms.tiny import HIDDEN, VOCAB, vocabulary, write_verifier

K = 3
SHAPES: list[dict[str, Any]] = [
    {},
    {"layers": 2, "style": "qwen3", "norm_output": False, "norm_before_residual": False},
    {"norm_before_fc": False, "fc_norm": True, "sliding_window": None, "aux_layers": (1, 3, 4, 6)},
    {"layers": 3, "sliding_window": 5, "full_attention_layers": (1,), "intermediate_size": 40},
]
BLOCKS: list[dict[str, Any]] = [
    {"layers": 2, "sliding_window": 6},
    {"layers": 3, "sliding_window": 5, "full_attention_indices": (1,), "sliding_window_non_causal": True},
]


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_verifier(tmp_path_factory.mktemp("verifier"))


def draft_with(verifier: Path, target: Path, *, reduced: bool = True, kind: str = "eagle3", **knobs: Any) -> Any:
    """Write a draft with random norms, and return the module in the very values that were written."""
    algorithm = registry.resolve(kind)
    config = algorithm.config(**knobs)
    model = algorithm.build(config, verifier, vocabulary() if reduced else None, 5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                generator = torch.Generator().manual_seed(len(name))
                parameter.copy_(0.5 + torch.rand(parameter.shape, generator=generator))
            if parameter.requires_grad:
                parameter.copy_(parameter.bfloat16())
    write_draft(target, algorithm.export(config, model, str(verifier)), ModelCard(title="planted"))
    return model


@torch.no_grad()
def record(model: Any, directory: Path) -> None:
    """As an engine would: the prompt, then steps of one or two new tokens, drafting K tokens in each."""
    directory.mkdir()
    generator = torch.Generator().manual_seed(2)
    total = 12
    ids = torch.randint(0, VOCAB, (total + 1,), generator=generator)
    features = torch.randn(total, model.num_aux * HIDDEN, generator=generator).bfloat16()
    for number, (begin, end) in enumerate([(0, 7), (7, 8), (8, 10), (10, 12)]):
        draft = _continue if isinstance(model, Eagle3Draft) else _fill_in
        logits_KV, drafted_K = draft(model, ids[: end + 1], features[:end].float())
        batch = ProbedBatch(
            request_ids=("r",),
            token_ids=ids[begin:end],
            positions=torch.arange(begin, end),
            features=features[begin:end],
            starts=torch.tensor([0]),
            ends=torch.tensor([end - begin]),
            next_token_ids=ids[end : end + 1],
            drafted=drafted_K[None],
            logits=logits_KV[None],
        )
        (directory / f"{step_name(number)}.safetensors").write_bytes(batch.pack())


def _logits(model: Any, normed_NH: Tensor) -> Tensor:
    logits_NV = torch.full((len(normed_NH), VOCAB), float("-inf"))
    ids_D = torch.arange(VOCAB) if model.vocabulary is None else model.vocabulary.verifier_ids_D
    logits_NV[:, ids_D] = normed_NH @ model.lm_head.weight.float().T
    return logits_NV


def _fill_in(model: BlockDraft, ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    """All K at once, from masks behind the newest token."""
    aligned = Aligned(ids, ids, ids, features, features)
    logits_KV = _logits(model, fill_in(model, aligned, len(features), K + 1)[1:])
    return logits_KV, logits_KV.argmax(-1)


def _continue(model: Eagle3Draft, ids: Tensor, aux: Tensor) -> tuple[Tensor, Tensor]:
    """One after the other, each from the state of the one before."""
    tokens, features = ids[1:], model.join(aux)
    logits, drafted = [], []
    for _ in range(K):
        state = decode(model, tokens, features, torch.arange(len(tokens)))[-1:]
        normed = model.norm(state)
        row_V = _logits(model, normed)[0]
        logits.append(row_V)
        drafted.append(row_V.argmax())
        tokens = torch.cat([tokens, drafted[-1][None]])
        features = torch.cat([features, normed if model.config.norm_output else state])
    return torch.stack(logits), torch.stack(drafted)


def rewrite(draft: Path, **changes: Any) -> None:
    content = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(content | changes))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("reduced", [True, False])
def test_the_replay_agrees_with_a_decoder_loop(
    shape: dict[str, Any], reduced: bool, verifier: Path, tmp_path: Path
) -> None:
    record(draft_with(verifier, tmp_path / "draft", reduced=reduced, **shape), tmp_path / "probe")
    found = replay(tmp_path / "probe", tmp_path / "draft", verifier, dtype="float32")
    assert found.holds and found.relative < 1e-4 and found.agreement == 1.0, found.describe()
    assert (found.steps, found.requests, len(found.positions)) == (4, 1, K)
    assert found.same_drafts == 4


@pytest.mark.parametrize("shape", BLOCKS)
@pytest.mark.parametrize("reduced", [True, False])
def test_blocks_agree_too_and_the_way_that_slots_see_is_named(
    shape: dict[str, Any], reduced: bool, verifier: Path, tmp_path: Path
) -> None:
    knobs = {"kind": "dflash", "block_size": K + 1, "mask_token_id": VOCAB - 1, **shape}
    record(draft_with(verifier, tmp_path / "draft", reduced=reduced, **knobs), tmp_path / "probe")
    found = replay(tmp_path / "probe", tmp_path / "draft", verifier, dtype="float32")
    assert found.holds and found.relative < 1e-4 and found.steps == 4, found.describe()
    flag = "sliding_window_non_causal"
    if "full_attention_indices" not in shape:
        rewrite(tmp_path / "draft", **{flag: True})
        found = replay(tmp_path / "probe", tmp_path / "draft", verifier, dtype="float32")
        assert not found.holds and found.explained_by == flag


@pytest.mark.parametrize("shape", SHAPES)
def test_the_served_config_gives_back_every_knob_of_the_shape(
    shape: dict[str, Any], verifier: Path, tmp_path: Path
) -> None:
    model = draft_with(verifier, tmp_path / "draft", **shape)
    knobs = served_config(read_draft(tmp_path / "draft"))
    again = build(knobs, verifier, vocabulary(), seed=0)  # type: ignore[arg-type]
    assert again.geometry == model.geometry
    assert {name: knobs.model_dump()[name] for name in shape} == shape


@pytest.mark.parametrize(("flag", "first"), [("norm_before_residual", 1), ("norm_output", 2), ("norm_before_fc", 1)])
def test_a_wrong_flag_is_seen_and_named(flag: str, first: int, verifier: Path, tmp_path: Path) -> None:
    knobs = {"norm_before_residual": True, "norm_output": True, "norm_before_fc": False}
    record(draft_with(verifier, tmp_path / "draft", **knobs), tmp_path / "probe")
    if flag == "norm_before_fc":  # its own tensor comes and goes with it
        draft_with(verifier, tmp_path / "other", **{**knobs, flag: True})
    else:
        (tmp_path / "draft").rename(tmp_path / "other")
        rewrite(tmp_path / "other", **{flag: not knobs[flag]})
    found = replay(tmp_path / "probe", tmp_path / "other", verifier, dtype="float32")
    assert not found.holds and found.explained_by == flag
    assert f"`{flag}` is turned the other way" in found.describe()
    assert next(p.position for p in found.positions if p.relative > found.tolerance) == first


def test_other_weights_are_seen_and_not_explained_away(verifier: Path, tmp_path: Path) -> None:
    model = draft_with(verifier, tmp_path / "draft")
    with torch.no_grad():
        model.layers[0].mlp.down_proj.weight.mul_(1.5)  # type: ignore[union-attr, operator]
    record(model, tmp_path / "probe")
    found = replay(tmp_path / "probe", tmp_path / "draft", verifier, dtype="float32")
    assert not found.holds and found.explained_by is None


def test_another_draft_vocabulary_is_seen(verifier: Path, tmp_path: Path) -> None:
    record(draft_with(verifier, tmp_path / "draft", reduced=False), tmp_path / "probe")
    draft_with(verifier, tmp_path / "other")
    found = replay(tmp_path / "probe", tmp_path / "other", verifier, dtype="float32")
    assert not found.same_tokens and not found.holds and "other tokens" in found.describe()


def test_bad_inputs_teach(verifier: Path, tmp_path: Path) -> None:
    draft_with(verifier, tmp_path / "draft")
    (tmp_path / "probe").mkdir()
    with pytest.raises(EvaluationError, match="recorded nothing"):
        replay(tmp_path / "probe", tmp_path / "draft", verifier, dtype="float32")
    (tmp_path / "probe" / "step-000000.safetensors").write_bytes(b"torn")
    with pytest.raises(EvaluationError, match="cannot be read"):
        replay(tmp_path / "probe", tmp_path / "draft", verifier, dtype="float32")
    with pytest.raises(FormatError, match="algorithm None"):
        replay(tmp_path / "probe", verifier, verifier, dtype="float32")
    rewrite(tmp_path / "draft", norm_output=None)
    (tmp_path / "probe" / "step-000000.safetensors").unlink()
    record(draft_with(verifier, tmp_path / "third"), tmp_path / "probe3")
    with pytest.raises(FormatError, match="not that of our eagle3 drafts"):
        replay(tmp_path / "probe3", tmp_path / "draft", verifier, dtype="float32")
