from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from speculators_core.algorithms._blocks.unrolled import Drafting
from speculators_core.algorithms.mtp.build import build, check, read_family
from speculators_core.algorithms.mtp.config import MTPConfig
from speculators_core.algorithms.mtp.export import export, stitch
from speculators_core.algorithms.mtp.families import FAMILIES, layer_config
from speculators_core.algorithms.mtp.model import MTPHead, attending_layer
from speculators_core.algorithms.mtp.objective import MTPObjective
from speculators_core.errors import ConfigError, FormatError, VerifierError
from speculators_core.formats.card import ModelCard
from speculators_core.formats.directory import read_draft, write_draft
from speculators_core.types import Aligned, DraftPlan
from tests.unit.speculators_core.algorithms.native_heads import CONFIGS, write_native_verifier
from tests.unit.speculators_core.algorithms.tiny import LAYERS, VOCAB, Vocabulary, pack, sample, write_verifier

FIXTURES = Path(__file__).parents[3] / "fixtures"


@pytest.fixture(scope="module")
def verifiers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("verifiers")
    return {name: write_native_verifier(root / name, name) for name in CONFIGS}


def made(directory: Path, **knobs: Any) -> tuple[MTPHead, MTPObjective]:
    config = MTPConfig(**knobs)
    return build(config, directory, None, seed=0), MTPObjective(config)


# ------------------------------------------------------------------------------------------------ the unroll


def decode(head: MTPHead, tokens: Tensor, states: Tensor) -> Tensor:
    """An ordinary causal run of the library's own layer with its own attention: states [N, H] before the last norm."""
    config = layer_config(head.family, head.text_config)
    config._attn_implementation = "eager"
    layer = head.family.part("DecoderLayer")(config, attending_layer(config))
    layer.load_state_dict(head.layer.state_dict())
    positions = torch.arange(tokens.numel())
    embeds = head.embed_tokens.weight[tokens].float()
    if head.family.blanks_first:
        embeds = torch.cat([torch.zeros_like(embeds[:1]), embeds[1:]])
    parts = [head.token_layernorm(embeds), head.hidden_layernorm(states)]
    joined = head.input_proj(torch.cat(parts[::-1] if head.family.hidden_first else parts, dim=-1))[None]
    mask = torch.full((tokens.numel(),) * 2, float("-inf")).triu(1)[None, None]
    result: Tensor = layer(joined, position_embeddings=head.rotary(joined, positions[None]), attention_mask=mask)
    return result[0]


@torch.no_grad()
def propose(head: MTPHead, aligned: Aligned, point: int, k: int) -> tuple[list[Tensor], list[int]]:
    """Normalised states and greedy tokens of k steps after token `point`, each fed by the one before."""
    tokens, states = aligned.input_ids[: point + 1], head.fed(aligned.aux_TAH[: point + 1])
    outputs, proposals = [], []
    for _ in range(k):
        out = decode(head, tokens, states)[-1:]
        normed = head.final_layernorm(out)
        outputs.append(normed)
        token = (normed @ head.lm_head.weight.float().T).argmax(-1)
        proposals.append(int(token))
        tokens = torch.cat([tokens, token])
        states = torch.cat([states, normed if head.family.recycles_normed else out])
    return outputs, proposals


@pytest.mark.parametrize("name", CONFIGS)
def test_an_unroll_is_what_a_served_head_computes(verifiers: dict[str, Path], name: str) -> None:
    head, objective = made(verifiers[name])
    aligned = objective.align(sample(14, [(3, 14)]))
    rows = torch.tensor([0, 2, 3, 7])
    with torch.no_grad():
        for number, row in enumerate(rows.tolist()):
            # the chain is fed its own proposals, as serving does: so write them into the row
            outputs, proposals = propose(head, aligned, row, 3)
            ids = aligned.input_ids.clone()
            ids[row + 1 : row + 3] = torch.tensor(proposals[:2])
            found = head(
                ids, aligned.position_ids, head.fed(aligned.aux_TAH), Drafting(rows, torch.zeros(13).long()), 3
            )
            if row + 1 < 13:  # earlier rows' keys are of other tokens now, which this row does not see
                for step in range(3):
                    torch.testing.assert_close(found[step][number][None], outputs[step], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_serving_feeds_what_the_family_says(verifiers: dict[str, Path], name: str) -> None:
    head, _ = made(verifiers[name])
    states = torch.randn(5, 32)
    teacher = head.teacher
    assert teacher is not None
    expected = teacher.normed(states, torch.float32) if head.family.fed_normed else states
    torch.testing.assert_close(head.fed(states), expected)
    assert head.family.fed_normed == (name != "mimo")
    compat, _ = made(verifiers[name], compat=True)
    assert torch.equal(compat.fed(states), states)


def test_the_walk_is_the_served_loop(verifiers: dict[str, Path]) -> None:
    head, objective = made(verifiers["glm4_moe"])
    aligned = objective.align(sample(24, [(5, 24)]))
    ids = aligned.input_ids.clone()
    generator = torch.Generator().manual_seed(0)
    for at in range(6, 23):
        (token,) = propose(head, replace(aligned, input_ids=ids), at - 1, 1)[1]
        ids[at] = token if torch.rand((), generator=generator) < 0.8 else int(torch.randint(VOCAB, ()))
    aligned = replace(aligned, input_ids=ids)
    tokens, accepted, point = ids.tolist(), [], 4
    while point + 1 < len(tokens):
        count = 0
        for offset, token in enumerate(propose(head, aligned, point, 3)[1], start=1):
            if point + offset >= len(tokens) or tokens[point + offset] != token:
                break
            count += 1
        accepted.append(count)
        point += count + 1
    assert list(objective.walk(head, aligned, 3)) == accepted
    assert sum(accepted) > 0 and min(accepted) < 3


# -------------------------------------------------------------------------------------------- what is learned


def test_packed_is_unpacked(verifiers: dict[str, Path]) -> None:
    head, objective = made(verifiers["mimo"])
    rows = [objective.align(sample(n, [(3, n - 1)], seed=n)) for n in (12, 17, 9)]
    packed = pack(rows, 40)
    denominators = objective.denominators(packed)
    together = objective.step(head, packed, denominators)
    alone = [objective.step(head, pack([row], row.input_ids.numel()), denominators) for row in rows]
    torch.testing.assert_close(torch.stack([result.loss for result in alone]).sum(), together.loss)
    for name, value in together.metrics.items():
        pooled = sum((result.metrics[name] for result in alone[1:]), alone[0].metrics[name])
        assert (pooled.sum, pooled.count) == pytest.approx((value.sum, value.count), rel=1e-4), name


def test_steps_weigh_as_told() -> None:
    weights = MTPConfig().step_weights
    assert weights == pytest.approx([0.5102040816, 0.3061224490, 0.1836734694])


# ---------------------------------------------------------------------------------------- in and out of a verifier


@pytest.mark.parametrize("name", CONFIGS)
def test_a_head_comes_out_and_goes_back_and_nothing_else_changes(
    verifiers: dict[str, Path], name: str, tmp_path: Path
) -> None:
    verifier = verifiers[name]
    head, objective = made(verifier)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.requires_grad:
                parameter.mul_(0.5)
    draft = export(objective.config, head, "org/verifier")
    written = write_draft(tmp_path / "draft", draft, ModelCard(title=name))
    assert all(key.startswith("mtp_layers.0.") for key in draft.tensors)
    assert read_draft(written).config["transformer_layer_config"] == head.text_config
    count = stitch(written, verifier, tmp_path / "stitched")
    before, after = (load_file(place / "model.safetensors") for place in (verifier, tmp_path / "stitched"))
    assert before.keys() == after.keys()
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    _, family, _ = read_family(verifier)
    stem = family.layer.format(depth=LAYERS)
    beside = {f"{joint.format(depth=LAYERS)}.weight" for joint in family.joints.values()}
    assert len(changed) == count
    assert all(key.startswith(stem) or key in beside for key in changed)
    assert all(torch.equal(after[key].float(), (before[key].float() * 0.5).bfloat16().float()) for key in changed)
    assert (tmp_path / "stitched" / "config.json").read_bytes() == (verifier / "config.json").read_bytes()
    again, _ = made(tmp_path / "stitched")
    for key, value in again.head_tensors().items():
        torch.testing.assert_close(value, head.head_tensors()[key], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_names_are_those_of_the_format(verifiers: dict[str, Path], name: str) -> None:
    head, objective = made(verifiers[name])
    draft = export(objective.config, head, "org/verifier")
    golden = json.loads((FIXTURES / f"mtp_{name}_text.config.json").read_text())
    assert set(draft.config) == set(golden) - {"auto_map"}
    assert draft.config["speculators_config"]["proposal_methods"] == golden["speculators_config"]["proposal_methods"]
    names = {line.split("\t")[0] for line in (FIXTURES / f"mtp_{name}_text.tensors.txt").read_text().splitlines()}
    assert set(draft.tensors) == names


def test_a_head_of_another_verifier_is_refused(verifiers: dict[str, Path], tmp_path: Path) -> None:
    head, objective = made(verifiers["mimo"])
    written = write_draft(tmp_path / "d", export(objective.config, head, "org/verifier"), ModelCard(title="t"))
    other = write_native_verifier(tmp_path / "other", "mimo", intermediate_size=40)
    with pytest.raises(FormatError, match=r"mlp\.\w+\.weight is \[\d+, \d+\] in the verifier"):
        stitch(written, other, tmp_path / "stitched")
    with pytest.raises(FormatError, match="no tensor"):
        stitch(written, verifiers["glm4_moe"], tmp_path / "elsewhere")
    (tmp_path / "there").mkdir()
    with pytest.raises(FormatError, match="exists already"):
        stitch(written, verifiers["mimo"], tmp_path / "there")


def test_the_untouched_are_copied_or_linked(verifiers: dict[str, Path], tmp_path: Path) -> None:
    verifier = tmp_path / "v"
    verifier.mkdir()
    whole = load_file(verifiers["mimo"] / "model.safetensors")
    parts = {
        "model-00001-of-00002.safetensors": {k: v for k, v in whole.items() if "mtp" not in k},
        "model-00002-of-00002.safetensors": {k: v for k, v in whole.items() if "mtp" in k},
    }
    for file, tensors in parts.items():
        save_file(tensors, verifier / file, metadata={"format": "pt"})
    index = {key: file for file, tensors in parts.items() for key in tensors}
    (verifier / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (verifier / "config.json").write_bytes((verifiers["mimo"] / "config.json").read_bytes())
    head, objective = made(verifier)
    written = write_draft(tmp_path / "d", export(objective.config, head, "org/verifier"), ModelCard(title="t"))
    for link in (True, False):
        target = tmp_path / f"stitched-{link}"
        stitch(written, verifier, target, link=link)
        assert (target / "model-00001-of-00002.safetensors").is_symlink() == link
        assert not (target / "model-00002-of-00002.safetensors").is_symlink()
        with safe_open(target / "model-00002-of-00002.safetensors", framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}


# ----------------------------------------------------------------------------------------------- bad input


def test_what_cannot_be_is_refused_before_capture(verifiers: dict[str, Path], tmp_path: Path) -> None:
    plain = write_verifier(tmp_path / "plain")
    config = MTPConfig()
    with pytest.raises(ConfigError, match="none is known for llama"):
        check(config, DraftPlan(plain, VOCAB, None, 64, False))
    with pytest.raises(ConfigError, match="remove draft_vocabulary"):
        check(config, DraftPlan(verifiers["mimo"], VOCAB, 40, 64, False))
    with pytest.raises(ConfigError, match="remove draft_vocabulary"):
        build(config, verifiers["mimo"], Vocabulary(torch.zeros(1), torch.zeros(1)), 0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"training\.row_tokens"):
        check(config, DraftPlan(verifiers["mimo"], VOCAB, None, 4, False))
    check(config, DraftPlan(verifiers["mimo"], VOCAB, None, 64, False))
    several = write_native_verifier(tmp_path / "several", "mimo")
    told = json.loads((several / "config.json").read_text()) | {"num_nextn_predict_layers": 2}
    (several / "config.json").write_text(json.dumps(told))
    with pytest.raises(ConfigError, match="2 native heads"):
        check(config, DraftPlan(several, VOCAB, None, 64, False))
    bare = write_verifier(tmp_path / "bare", **CONFIGS["mimo"])
    with pytest.raises(VerifierError, match=r"no tensor model\.mtp_layers\.0\."):
        build(config, bare, None, 0)
    with pytest.raises(ValueError, match="ttt_steps"):
        MTPConfig(ttt_steps=3)  # type: ignore[call-arg]


def test_every_family_says_where_it_is_read_off() -> None:
    assert all(family.source.count(".py:") >= 2 for family in FAMILIES)
    assert {family.name for family in FAMILIES} == set(CONFIGS)
