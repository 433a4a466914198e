"""Foreign layouts into ours: every tensor finds its place by name, and what does not fit is refused before writing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from speculators_core import registry
from speculators_core.convert import ConvertOptions, convert, convert_to, detect, layout_names, read_foreign
from speculators_core.convert.layouts import LAYOUTS
from speculators_core.convert.source import Source
from speculators_core.errors import ConfigError, DraftsmithError, FormatError
from speculators_core.formats.card import ModelCard
from speculators_core.formats.directory import write_draft
from speculators_core.types import ExportedDraft
from tests.unit.speculators_core.algorithms.native_heads import write_native_verifier
from tests.unit.speculators_core.algorithms.tiny import HIDDEN, LAYERS, VOCAB, write_verifier
from tests.unit.speculators_core.convert import foreign_drafts as foreign


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_verifier(tmp_path_factory.mktemp("verifier"))


def read(directory: Path, verifier: Path | None, **options: Any) -> tuple[str, ExportedDraft, tuple[str, ...]]:
    settings = ConvertOptions(**options)
    return read_foreign(Source(directory, settings.allow_bin), verifier, "org/verifier", settings)


def draft_of(directory: Path, verifier: Path | None, **options: Any) -> ExportedDraft:
    return read(directory, verifier, **options)[1]


def verifier_tensors(verifier: Path) -> dict[str, Tensor]:
    return dict(load_file(verifier / "model.safetensors"))


def test_every_layout_says_where_it_was_read() -> None:
    for layout in LAYOUTS.values():
        assert layout.sources and layout.holds
        for source in layout.sources:
            assert "/" in source.repository and "." in source.file
            assert re.fullmatch(r"[0-9a-f]{40}|v[\d.]+", source.commit), source


# --- EAGLE-3 ---------------------------------------------------------------------------------------------------------


def test_eagle3_as_its_authors_write_it(verifier: Path, tmp_path: Path) -> None:
    tensors = {**foreign.filled(foreign.eagle3_shapes()), **foreign.tables()}
    layout, draft, notes = read(foreign.write(tmp_path / "d", foreign.eagle3_config(), tensors), verifier)
    assert layout == "safeai"
    config = draft.config
    assert config["speculators_model_type"] == "eagle3" and config["draft_vocab_size"] == foreign.DRAFT_VOCAB
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, LAYERS // 2, LAYERS - 3]
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "embed_requires_grad")
    assert not any(config[flag] for flag in flags)
    layers = config["transformer_layer_config"]
    assert layers["rope_parameters"] == {"rope_type": "default", "rope_theta": 500000.0}
    assert layers["layer_types"] == ["full_attention"] and layers["sliding_window"] is None
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": "org/verifier", "architectures": ["LlamaForCausalLM"]
    }  # fmt: skip
    for name, tensor in tensors.items():
        assert torch.equal(draft.tensors[name.replace("midlayer.", "layers.0.")], tensor), name
    assert torch.equal(draft.tensors["embed_tokens.weight"], verifier_tensors(verifier)["model.embed_tokens.weight"])
    assert draft.tensors.keys() - {n.replace("midlayer.", "layers.0.") for n in tensors} == {"embed_tokens.weight"}
    assert any("embedding" in note for note in notes) and any("names no layers" in note for note in notes)


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # changes of config.json, arguments of the shapes, keys of ours
    "layers as a list": ({}, {"prefix": "midlayer.0."}, {}),
    "two layers of qwen3": (
        {"num_hidden_layers": 2},
        {"prefix": "layers.0.", "layers": 2, "normed_heads": True},
        {},
    ),
    "four features at the top": (
        {"eagle_aux_hidden_state_layer_ids": [1, 3, 5, 7]},
        {"features": 4},
        {"eagle_aux_hidden_state_layer_ids": [1, 3, 5, 7]},
    ),
    "outputs counted in eagle_config": (
        {"eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 2, 6]}},
        {},
        {"eagle_aux_hidden_state_layer_ids": [1, 3, 7]},
    ),
    "norms that SGLang added": ({"norm_output": True}, {}, {"norm_output": True}),
    "residual after the norm": ({"norm_before_residual": True}, {}, {"norm_before_residual": True}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_its_variants(verifier: Path, tmp_path: Path, variant: str) -> None:
    changes, shapes, keys = VARIANTS[variant]
    tensors = {**foreign.filled(foreign.eagle3_shapes(**shapes)), **foreign.tables()}
    draft = draft_of(foreign.write(tmp_path / "d", foreign.eagle3_config(**changes), tensors), verifier)
    assert {key: draft.config[key] for key in keys} == keys
    style = draft.config["transformer_layer_config"]["model_type"]
    assert style == ("qwen3" if shapes.get("normed_heads") else "llama")
    assert all(torch.equal(draft.tensors[n], t) for n, t in tensors.items() if n in draft.tensors)


def test_norms_for_each_feature_under_their_old_names(verifier: Path, tmp_path: Path) -> None:
    norms = foreign.filled({f"aux_norm_{which}.weight": (HIDDEN,) for which in ("low", "mid", "high")}, seed=1)
    tensors = {**foreign.filled(foreign.eagle3_shapes()), **foreign.tables(), **norms}
    config = foreign.eagle3_config(use_aux_norm=True)
    draft = draft_of(foreign.write(tmp_path / "d", config, tensors), verifier)
    assert draft.config["fc_norm"]
    for index, which in enumerate(("low", "mid", "high")):
        assert torch.equal(draft.tensors[f"fc_norm.{index}.weight"], norms[f"aux_norm_{which}.weight"])


def test_features_wider_than_the_draft(tmp_path: Path) -> None:
    """`target_hidden_size`: a draft narrower than its verifier brings an embedding of its own."""
    verifier = write_verifier(tmp_path / "v", hidden_size=2 * HIDDEN, num_attention_heads=8)
    shapes = foreign.eagle3_shapes(width=2 * HIDDEN) | {"embed_tokens.weight": (VOCAB, HIDDEN)}
    head = foreign.filled({"model.embed_tokens.weight": (VOCAB, 2 * HIDDEN), "lm_head.weight": (VOCAB, 2 * HIDDEN)})
    save_file({**head, "model.norm.weight": torch.ones(2 * HIDDEN)}, verifier / "model.safetensors")
    config = foreign.eagle3_config(target_hidden_size=2 * HIDDEN)
    draft = draft_of(foreign.write(tmp_path / "d", config, {**foreign.filled(shapes), **foreign.tables()}), verifier)
    assert draft.config["target_hidden_size"] == 2 * HIDDEN
    assert draft.tensors["fc.weight"].shape == (HIDDEN, 6 * HIDDEN)


def test_wrapped_in_a_model_and_fused(verifier: Path, tmp_path: Path) -> None:
    plain = foreign.filled(foreign.eagle3_shapes("layers.0."))
    fused = dict(plain)
    parts = [fused.pop(f"layers.0.self_attn.{name}_proj.weight") for name in "qkv"]
    fused["layers.0.self_attn.qkv_proj.weight"] = torch.cat(parts)
    halves = [fused.pop(f"layers.0.mlp.{name}_proj.weight") for name in ("gate", "up")]
    fused["layers.0.mlp.gate_up_proj.weight"] = torch.cat(halves)
    wrapped = {name if name == "lm_head.weight" else f"model.{name}": tensor for name, tensor in fused.items()}
    directory = foreign.write(tmp_path / "d", foreign.eagle3_config(), {**wrapped, **foreign.tables()})
    draft = draft_of(directory, verifier)
    assert all(torch.equal(draft.tensors[name], tensor) for name, tensor in plain.items())


def test_floats_are_rounded_to_what_is_served(verifier: Path, tmp_path: Path) -> None:
    tensors = {**foreign.filled(foreign.eagle3_shapes(), dtype=torch.float16), **foreign.tables()}
    _, draft, notes = read(foreign.write(tmp_path / "d", foreign.eagle3_config(), tensors), verifier)
    assert torch.equal(draft.tensors["fc.weight"], tensors["fc.weight"].bfloat16())
    assert any("rounded from float16" in note for note in notes)


# --- draft vocabularies ----------------------------------------------------------------------------------------------


def with_tables(**changes: Any) -> dict[str, Tensor]:
    found = {**foreign.filled(foreign.eagle3_shapes()), **foreign.tables(), **changes}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def test_tables_of_ids_are_read_as_ids(verifier: Path, tmp_path: Path) -> None:
    ids = torch.tensor(foreign.KEPT)
    wanted = foreign.tables()
    draft = draft_of(foreign.write(tmp_path / "ids", foreign.eagle3_config(), with_tables(d2t=ids)), verifier)
    assert torch.equal(draft.tensors["d2t"], wanted["d2t"]) and torch.equal(draft.tensors["t2d"], wanted["t2d"])
    alone = draft_of(foreign.write(tmp_path / "alone", foreign.eagle3_config(), with_tables(t2d=None)), verifier)
    assert torch.equal(alone.tensors["t2d"], wanted["t2d"])


def test_rows_of_the_head_follow_a_table_that_does_not_ascend(verifier: Path, tmp_path: Path) -> None:
    shuffled = torch.randperm(foreign.DRAFT_VOCAB, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor(foreign.KEPT)[shuffled]
    tensors = with_tables(d2t=ids)
    draft = draft_of(foreign.write(tmp_path / "d", foreign.eagle3_config(), tensors), verifier)
    ours = torch.arange(foreign.DRAFT_VOCAB) + draft.tensors["d2t"]
    for row, token in enumerate(ids.tolist()):
        at = ours.tolist().index(token)
        assert torch.equal(draft.tensors["lm_head.weight"][at], tensors["lm_head.weight"][row])


def test_a_whole_vocabulary_needs_no_tables(verifier: Path, tmp_path: Path) -> None:
    """SpecForge writes them all the same: zeros and ones."""
    head = foreign.filled({"lm_head.weight": (VOCAB, HIDDEN)}, seed=2)
    tables = {"d2t": torch.zeros(VOCAB, dtype=torch.int64), "t2d": torch.ones(VOCAB, dtype=torch.bool)}
    config = foreign.eagle3_config() | {"draft_vocab_size": VOCAB}
    tensors = {**foreign.filled(foreign.eagle3_shapes()), **head, **tables}
    draft = draft_of(foreign.write(tmp_path / "d", config, tensors), verifier)
    assert not {"d2t", "t2d"} & draft.tensors.keys()
    del tensors["lm_head.weight"]
    borrowed = draft_of(foreign.write(tmp_path / "b", config, tensors), verifier)
    assert torch.equal(borrowed.tensors["lm_head.weight"], verifier_tensors(verifier)["lm_head.weight"])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"d2t": torch.arange(40)}, "not those that t2d keeps"),
        ({"d2t": torch.arange(39)}, "not those that t2d keeps"),
        ({"d2t": torch.full((40,), 90), "t2d": None}, "out of range.*given twice"),
        ({"d2t": torch.arange(40), "t2d": None}, "as distances and as ids"),
        ({"t2d": torch.ones(VOCAB + 1, dtype=torch.bool)}, "a verifier of 97 tokens"),
        ({"d2t": None, "t2d": None}, "no d2t or t2d"),
    ],
)
def test_tables_that_are_wrong_or_unclear(verifier: Path, tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    directory = foreign.write(tmp_path / "d", foreign.eagle3_config(), with_tables(**changes))
    with pytest.raises(DraftsmithError, match=says):
        read(directory, verifier)


# --- P-EAGLE, DFlash, DFlash2, DSpark --------------------------------------------------------------------------------


def test_peagle_brings_its_embedding_and_its_mask(verifier: Path, tmp_path: Path) -> None:
    config = foreign.eagle3_config(num_hidden_layers=2) | {"architectures": ["PEagleDraftModel"]}
    tensors = {**foreign.filled(foreign.peagle_shapes()), **foreign.tables()}
    directory = foreign.write(tmp_path / "d", config, tensors)
    with pytest.raises(FormatError, match="no mask token"):
        read(directory, verifier)
    layout, draft, _ = read(directory, verifier, mask_token_id=7, speculative_tokens=4)
    assert layout == "peagle" and draft.config["mask_token_id"] == 7 and draft.config["embed_requires_grad"]
    assert draft.config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    assert all(torch.equal(draft.tensors[name], tensor) for name, tensor in tensors.items())
    flat = {**tensors, "mask_hidden": tensors["mask_hidden"].reshape(1, -1).contiguous()}
    other = foreign.write(tmp_path / "flat", {**config, "ptd_token_id": 9}, flat)
    assert draft_of(other, verifier).tensors["mask_hidden"].shape == (1, 1, 3 * HIDDEN)
    assert draft_of(other, verifier).config["mask_token_id"] == 9


def test_dflash_counts_outputs_and_sees_blocks_both_ways(verifier: Path, tmp_path: Path) -> None:
    tensors = foreign.filled(foreign.block_shapes())
    layout, draft, _ = read(foreign.write(tmp_path / "d", foreign.block_config(), tensors), verifier)
    assert layout == "zlab" and draft.config["speculators_model_type"] == "dflash"
    assert draft.config["aux_hidden_state_layer_ids"] == [2, 4, 5] and draft.config["block_size"] == 8
    assert draft.config["sliding_window_non_causal"] and not draft.config["sample_from_anchor"]
    assert draft.config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 7
    assert draft.tensors.keys() == tensors.keys()
    assert all(torch.equal(draft.tensors[name], tensor) for name, tensor in tensors.items())


SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 64, "use_sliding_window": True}


@pytest.mark.parametrize(
    ("changes", "non_causal"),
    [
        (SLIDING, False),
        ({**SLIDING, "is_causal": False}, True),
        ({**SLIDING, "dflash_config": {"causal": False}}, True),
    ],
)
def test_causality_of_sliding_layers(verifier: Path, tmp_path: Path, changes: dict[str, Any], non_causal: bool) -> None:
    config = foreign.block_config(**{k: v for k, v in changes.items() if k == "dflash_config"}) | {
        k: v for k, v in changes.items() if k != "dflash_config"
    }
    draft = draft_of(foreign.write(tmp_path / "d", config, foreign.filled(foreign.block_shapes())), verifier)
    assert draft.config["sliding_window_non_causal"] is non_causal
    assert draft.config["transformer_layer_config"]["sliding_window"] == 64


def test_names_of_an_assistant_and_fused_projections(verifier: Path, tmp_path: Path) -> None:
    plain = foreign.filled(foreign.block_shapes())
    told = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    tensors = {told.get(name, name): tensor for name, tensor in plain.items() if "layers.0.self_attn" not in name}
    tensors |= {
        n: t
        for n, t in plain.items()
        if "layers.0.self_attn" in n and not n.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
    }
    tensors["layers.0.self_attn.qkv_proj.weight"] = torch.cat(
        [plain[f"layers.0.self_attn.{name}_proj.weight"] for name in "qkv"]
    )
    draft = draft_of(foreign.write(tmp_path / "d", foreign.block_config(), tensors), verifier)
    assert all(torch.equal(draft.tensors[name], tensor) for name, tensor in plain.items())


def test_copies_of_the_verifiers_matrices_are_left_to_the_verifier(verifier: Path, tmp_path: Path) -> None:
    own = verifier_tensors(verifier)
    copies = {"embed_tokens.weight": own["model.embed_tokens.weight"], "lm_head.weight": own["lm_head.weight"]}
    backbone = foreign.filled(foreign.block_shapes())
    draft = draft_of(foreign.write(tmp_path / "d", foreign.block_config(), {**backbone, **copies}), verifier)
    assert draft.tensors.keys() == backbone.keys()
    changed = {**copies, "lm_head.weight": copies["lm_head.weight"] + 1}
    with pytest.raises(FormatError, match=r"lm_head\.weight is not the verifier's"):
        read(foreign.write(tmp_path / "e", foreign.block_config(), {**backbone, **changed}), verifier)


def test_dflash2_keeps_its_selector(verifier: Path, tmp_path: Path) -> None:
    config = foreign.block_config(dflash_config=foreign.SELECTING)
    tensors = foreign.filled(foreign.selecting_shapes())
    draft = draft_of(foreign.write(tmp_path / "d", config, tensors), verifier)
    assert draft.config["speculators_model_type"] == "dflash2"
    assert {key: draft.config[key] for key in foreign.SELECTING} == foreign.SELECTING
    assert all(torch.equal(draft.tensors[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_dspark_of_deepseek(verifier: Path, tmp_path: Path, head: str) -> None:
    own = verifier_tensors(verifier)
    frozen = {"embed_tokens.weight": own["model.embed_tokens.weight"], "lm_head.weight": own["lm_head.weight"]}
    tensors = foreign.filled(foreign.corrected_shapes(head))
    directory = foreign.write(tmp_path / "d", foreign.deepspec_config(head), {**tensors, **frozen})
    layout, draft, _ = read(directory, verifier)
    assert layout == "deepspec" and draft.config["markov_head_type"] == head and draft.config["sample_from_anchor"]
    assert draft.config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 8
    assert draft.tensors.keys() == tensors.keys()
    assert all(torch.equal(draft.tensors[name], tensor) for name, tensor in tensors.items())


def test_dspark_of_specforge_keeps_its_knobs_in_dflash_config(verifier: Path, tmp_path: Path) -> None:
    top = foreign.deepspec_config()
    heads = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
    nested = {key: top[key] for key in heads}
    config = foreign.block_config(dflash_config={"projector_type": "dspark", **nested})
    config["architectures"] = ["DSparkDraftModel"]
    directory = foreign.write(tmp_path / "d", config, foreign.filled(foreign.corrected_shapes()))
    layout, draft, _ = read(directory, verifier)
    assert layout == "deepspec" and {key: draft.config[key] for key in heads} == nested


# --- what is refused -------------------------------------------------------------------------------------------------


def good(tmp_path: Path, tensors: dict[str, Tensor] | None = None, **changes: Any) -> Path:
    found = with_tables() if tensors is None else tensors
    return foreign.write(tmp_path / "d", foreign.eagle3_config() | changes, found)


@pytest.mark.parametrize(
    ("tensors", "changes", "says"),
    [
        ({"fc.bias": torch.zeros(HIDDEN)}, {}, r"fc\.bias is unknown"),
        (
            {"norm.weight": None, "midlayer.mlp.up_proj.weight": None},
            {},
            r"mlp\.up_proj\.weight is missing; norm\.weight",
        ),
        ({"norm.weight": torch.ones(HIDDEN - 1)}, {}, r"norm\.weight is \[31\]"),
        ({"norm.weight": torch.ones(HIDDEN, dtype=torch.int8)}, {}, "quantised"),
        ({}, {"vocab_size": VOCAB + 1}, "97"),
        ({}, {"hidden_size": HIDDEN // 2}, "a verifier of 16 channels"),
        ({}, {"eagle_aux_hidden_state_layer_ids": [1, 2, 99]}, "0 to 8"),
        ({}, {"eagle_aux_hidden_state_layer_ids": [1, 2]}, "joins 3 features"),
        ({}, {"attention_bias": True}, "attention_bias"),
        ({}, {"rms_norm_eps": None}, "lacks rms_norm_eps"),
        ({"midlayer.mlp.experts.0.up_proj.weight": torch.ones(1)}, {}, "mixtures of experts"),
        ({"midlayer.self_attn.kv_a_proj_with_mqa.weight": torch.ones(1)}, {}, "latent"),
        ({}, {"eagle_config": {"use_aux_hidden_state": False}}, "EAGLE-1"),
    ],
)
def test_eagle3_that_does_not_fit(
    verifier: Path, tmp_path: Path, tensors: dict[str, Any], changes: dict[str, Any], says: str
) -> None:
    directory = good(tmp_path, with_tables(**tensors), **changes)
    target = tmp_path / "out"
    with pytest.raises(FormatError, match=says):
        convert(Source(directory), target, verifier, None, ConvertOptions())
    assert not target.exists()


@pytest.mark.parametrize(
    ("tensors", "changes", "says"),
    [
        ({"layers.0.self_attn.g_proj.weight": torch.ones(1)}, {}, "gated"),
        ({"aux_hidden_norms.0.weight": torch.ones(HIDDEN)}, {}, "norms every feature"),
        ({}, {"dflash_config": {"output_multiplier": 0.5}}, "output_multiplier is 0.5"),
        ({}, {"block_size": None}, "block_size"),
        ({}, {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}, "one word for all"),
        ({}, {"dflash_config": {"mask_token_id": None}}, "no mask token"),
        ({}, {"dflash_config": {"mask_token_id": VOCAB}}, "outside the vocabulary"),
    ],
)
def test_blocks_that_do_not_fit(
    verifier: Path, tmp_path: Path, tensors: dict[str, Any], changes: dict[str, Any], says: str
) -> None:
    config = foreign.block_config(dflash_config=changes.pop("dflash_config", {})) | changes
    directory = foreign.write(tmp_path / "d", config, {**foreign.filled(foreign.block_shapes()), **tensors})
    with pytest.raises(FormatError, match=says):
        read(directory, verifier)


def test_what_is_no_layout_or_several(verifier: Path, tmp_path: Path) -> None:
    eagle1 = {"fc.weight": (HIDDEN, 2 * HIDDEN), "fc.bias": (HIDDEN,), **foreign.layer("layers.0.")}
    old = foreign.write(tmp_path / "eagle1", foreign.decoder_config(), foreign.filled(eagle1))
    with pytest.raises(FormatError, match=r"fits no layout.*\n.*EAGLE-1"):
        detect(Source(old))
    both = {**foreign.eagle3_shapes(), **foreign.block_shapes()}
    unclear = foreign.write(tmp_path / "both", foreign.eagle3_config(), foreign.filled(both))
    with pytest.raises(FormatError, match=r"several layouts: safeai, zlab.*\n.*--from"):
        detect(Source(unclear))
    with pytest.raises(ConfigError, match="'eagle4' is not a layout"):
        read(unclear, verifier, layout="eagle4")
    with pytest.raises(ConfigError, match="--verifier"):
        read(good(tmp_path), None)
    assert set(layout_names()) == {"speculators", "safeai", "zlab", "deepspec", "peagle", "native"}


def test_pickles_are_refused_with_the_way_out(verifier: Path, tmp_path: Path) -> None:
    directory = tmp_path / "d"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(foreign.eagle3_config()))
    tensors = with_tables()
    torch.save(tensors, directory / "pytorch_model.bin")
    with pytest.raises(FormatError, match=r"is a pickle.*\n.*weights_only=True.*--allow-bin") as refused:
        read(directory, verifier)
    draft = draft_of(directory, verifier, allow_bin=True)
    assert torch.equal(draft.tensors["fc.weight"], tensors["fc.weight"])
    command = re.search(r'python -c "(.*?)"', str(refused.value))
    assert command is not None
    subprocess.run([sys.executable, "-c", command[1]], cwd=directory, check=True, timeout=60)  # what users are told
    (directory / "pytorch_model.bin").unlink()
    assert torch.equal(draft_of(directory, verifier).tensors["fc.weight"], tensors["fc.weight"])


def test_a_hostile_pickle_runs_nothing_even_when_allowed(verifier: Path, tmp_path: Path) -> None:
    directory = tmp_path / "d"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(foreign.eagle3_config()))
    mark = tmp_path / "ran"

    class Touch:
        def __reduce__(self) -> tuple[Any, ...]:
            return mark.touch, ()

    torch.save({"fc.weight": Touch()}, directory / "pytorch_model.bin")
    with pytest.raises(FormatError, match="more than tensors"):
        read(directory, verifier, allow_bin=True)
    assert not mark.exists()


# --- back out --------------------------------------------------------------------------------------------------------


def test_out_to_the_authors_layout_and_back(verifier: Path, tmp_path: Path) -> None:
    source = good(tmp_path)
    ours, theirs, again = tmp_path / "ours", tmp_path / "theirs", tmp_path / "again"
    convert(Source(source), ours, verifier, None, ConvertOptions())
    done = convert_to("safeai", Source(ours), theirs, verifier, ConvertOptions())
    assert done.layout == "speculators" and done.target == "safeai"
    before, after = load_file(source / "model.safetensors"), load_file(theirs / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    config, written = foreign.eagle3_config(), json.loads((theirs / "config.json").read_text())
    assert {key: written[key] for key in config if key != "torch_dtype"} == {
        key: value for key, value in config.items() if key != "torch_dtype"
    }
    convert(Source(theirs), again, verifier, None, ConvertOptions())
    assert (again / "config.json").read_bytes() == (ours / "config.json").read_bytes()
    assert (again / "model.safetensors").read_bytes() == (ours / "model.safetensors").read_bytes()
    with pytest.raises(FormatError, match="exists already"):
        convert_to("safeai", Source(ours), theirs, verifier, ConvertOptions())


def test_sglang_counts_outputs_and_knows_two_more_norms(verifier: Path, tmp_path: Path) -> None:
    norms = foreign.filled({f"fc_norm.{index}.weight": (HIDDEN,) for index in range(3)}, seed=3)
    tensors = with_tables(**norms)
    source = good(tmp_path, tensors, fc_norm=True, norm_output=True, eagle_aux_hidden_state_layer_ids=[1, 4, 6])
    theirs = tmp_path / "theirs"
    with pytest.raises(
        FormatError, match=r"ignore parts.*\n.*fc_norm: false, norm_output: false, aux_layers: \[2, 4, 5\]"
    ):
        convert_to("safeai", Source(source), theirs, verifier, ConvertOptions())
    convert_to("sglang", Source(source), theirs, verifier, ConvertOptions())
    written = json.loads((theirs / "config.json").read_text())
    assert written["fc_norm"] and written["norm_output"]
    assert written["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 3, 5]
    back = draft_of(theirs, verifier)
    assert back.config["eagle_aux_hidden_state_layer_ids"] == [1, 4, 6]
    assert all(torch.equal(back.tensors[n.replace("midlayer.", "layers.0.")], t) for n, t in tensors.items())
    with pytest.raises(ConfigError, match="'medusa' is not a layout to write"):
        convert_to("medusa", Source(source), tmp_path / "x", verifier, ConvertOptions())


def test_a_draft_of_another_verifier_is_named(tmp_path: Path) -> None:
    other = write_verifier(tmp_path / "v", num_hidden_layers=4)
    directory = good(tmp_path, eagle_aux_hidden_state_layer_ids=[2, 4, 5])
    with pytest.raises(DraftsmithError, match="a verifier of 4 layers has 0 to 4"):
        read(directory, other)


# --- the speculators format and native heads -------------------------------------------------------------------------


def speculators_config(**changes: Any) -> dict[str, Any]:
    """As an early version of the format wrote EAGLE-3: no norms beyond the first, rope as in transformers 4."""
    section = {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "verifier": {"name_or_path": "org/other", "architectures": ["LlamaForCausalLM"]},
    }
    return {
        "architectures": ["Eagle3Speculator"],
        "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
        "draft_vocab_size": foreign.DRAFT_VOCAB,
        "has_no_defaults_at_init": False,
        "norm_before_residual": False,
        "speculators_config": section,
        "speculators_model_type": "eagle3",
        "speculators_version": "0.1.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformer_layer_config": foreign.decoder_config(),
        "transformers_version": "4.53.2",
        **changes,
    }


def test_an_early_speculators_checkpoint_is_completed(verifier: Path, tmp_path: Path) -> None:
    tensors = {**foreign.filled(foreign.eagle3_shapes("layers.0.")), **foreign.tables()}
    directory = foreign.write(tmp_path / "d", speculators_config(), tensors)
    layout, draft, notes = read_foreign(Source(directory), verifier, None, ConvertOptions())
    assert layout == "speculators" and any("missing" in note for note in notes)
    assert draft.config["speculators_config"]["verifier"]["name_or_path"] == "org/other"
    assert draft.config["eagle_aux_hidden_state_layer_ids"] == (2, 4, 5)
    assert not draft.config["norm_before_residual"] and not draft.config["norm_output"]
    layers = draft.config["transformer_layer_config"]
    assert layers["rope_parameters"]["rope_theta"] == 500000.0 and layers["layer_types"] == ["full_attention"]
    assert all(torch.equal(draft.tensors[name], tensor) for name, tensor in tensors.items())
    with pytest.raises(ConfigError, match="--verifier"):
        read_foreign(Source(directory), None, None, ConvertOptions())
    strange = foreign.write(tmp_path / "e", speculators_config(surprise=1), tensors)
    with pytest.raises(FormatError, match="does not know: surprise"):
        read(strange, verifier)
    other = foreign.write(tmp_path / "f", speculators_config(speculators_model_type="medusa"), tensors)
    with pytest.raises(FormatError, match="'medusa' is none of"):
        read(other, verifier)


@pytest.mark.parametrize("kind", registry.names())
def test_our_own_exports_come_through_byte_for_byte(kind: str, tmp_path: Path) -> None:
    verifier = write_native_verifier(tmp_path / "verifier", "mimo")
    algorithm = registry.resolve(kind)
    config = algorithm.config()
    exported = algorithm.export(config, algorithm.build(config, verifier, None, 0), "org/verifier")
    ours = write_draft(tmp_path / "ours", exported, ModelCard(title="t"))
    done = convert(Source(ours), tmp_path / "again", None, None, ConvertOptions())
    assert done.layout == "speculators" and done.algorithm == kind and not done.notes
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (ours / name).read_bytes(), name


def test_a_verifiers_own_head_is_taken_out(tmp_path: Path) -> None:
    verifier = write_native_verifier(tmp_path / "verifier", "qwen3_5")
    layout, draft, _ = read(verifier, None)
    assert layout == "native" and draft.config["speculators_config"]["verifier"]["name_or_path"] == "org/verifier"
    stored = load_file(verifier / "model.safetensors")
    assert torch.equal(draft.tensors["mtp_layers.0.input_proj.weight"], stored["mtp.fc.weight"])
    theirs = {name for name in stored if name.startswith("mtp.")}
    assert len(theirs) == len(draft.tensors)
