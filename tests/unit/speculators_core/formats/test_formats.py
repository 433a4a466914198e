from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from speculators_core.algorithms.eagle3.build import build
from speculators_core.algorithms.eagle3.config import Eagle3Config
from speculators_core.algorithms.eagle3.export import export
from speculators_core.errors import FormatError
from speculators_core.formats.card import ModelCard
from speculators_core.formats.directory import read_draft, write_draft
from speculators_core.formats.servable import check_servable, parse_config
from speculators_core.types import ExportedDraft
from tests.unit.speculators_core.algorithms.tiny import vocabulary, write_verifier

FIXTURES = Path(__file__).parents[3] / "fixtures"


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_verifier(tmp_path_factory.mktemp("verifier"))


def exported(verifier: Path, *, reduced: bool = True, **knobs: Any) -> ExportedDraft:
    config = Eagle3Config(**knobs)
    return export(config, build(config, verifier, vocabulary() if reduced else None, 0), "org/verifier")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("case", "knobs"), [("eagle3_llama_128", {"style": "llama"}), ("eagle3_qwen3_512", {"style": "qwen3", "layers": 2})]
)
def test_names_and_keys_are_those_of_the_format(verifier: Path, case: str, knobs: dict[str, Any]) -> None:
    """Against what the peer wrote for drafts of the same kind: keys of config.json, names and dtypes of tensors."""
    golden = json.loads((FIXTURES / f"{case}.config.json").read_text())
    draft = exported(verifier, reduced=case.endswith("128"), **knobs)
    assert set(draft.config) == set(golden) - {"auto_map"}
    assert set(draft.config["transformer_layer_config"]) == set(golden["transformer_layer_config"])
    assert set(draft.config["speculators_config"]) == set(golden["speculators_config"])
    lines = (FIXTURES / f"{case}.tensors.txt").read_text().split("\n")
    wanted = {name: dtype for name, _, dtype in (line.split("\t") for line in lines if line)}
    names = {torch.bfloat16: "BF16", torch.int64: "I64", torch.bool: "BOOL"}
    assert {name: names[tensor.dtype] for name, tensor in draft.tensors.items()} == wanted
    parse_config(golden | {"dtype": "bfloat16"})  # and theirs is one that we read


def test_a_directory_holds_three_files_and_comes_back(verifier: Path, tmp_path: Path) -> None:
    draft = exported(verifier)
    card = ModelCard(title="demo", verifier_license="apache-2.0", data_license="cc-by-4.0")
    directory = write_draft(tmp_path / "draft", draft, card)
    assert sorted(path.name for path in directory.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    with safe_open(directory / "model.safetensors", framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    back = read_draft(directory)
    assert back.config == json.loads(json.dumps(draft.config))
    assert back.tensors.keys() == draft.tensors.keys()
    assert all(torch.equal(back.tensors[name], tensor) for name, tensor in draft.tensors.items())
    text = (directory / "README.md").read_text()
    assert "license: apache-2.0" in text and "cc-by-4.0" in text and "org/verifier" in text
    assert "model_type" not in back.config and back.config["dtype"] == "bfloat16"


def test_a_tied_head_is_written_twice(tmp_path: Path) -> None:
    verifier = write_verifier(tmp_path / "v", tie_word_embeddings=True)
    directory = write_draft(tmp_path / "draft", exported(verifier, reduced=False), ModelCard(title="t"))
    tensors = read_draft(directory).tensors
    assert torch.equal(tensors["lm_head.weight"], tensors["embed_tokens.weight"]) and "d2t" not in tensors


def test_features_are_counted_where_vllm_looks(verifier: Path) -> None:
    assert "num_aux_hidden_states" not in exported(verifier).config["transformer_layer_config"]
    two = exported(verifier, aux_layers=(1, 5)).config
    assert two["transformer_layer_config"]["num_aux_hidden_states"] == 2
    assert two["eagle_aux_hidden_state_layer_ids"] == [1, 5]


def test_the_draft_is_served_with_the_scale_that_it_was_trained_with(tmp_path: Path) -> None:
    verifier = write_verifier(tmp_path / "v", model_type="granite", logits_scaling=8.0)
    assert exported(verifier).config["transformer_layer_config"]["logit_scale"] == 0.125


def test_foreign_files_are_not_mixed_in(verifier: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FormatError, match=r"notes\.txt"):
        write_draft(tmp_path, exported(verifier), ModelCard(title="t"))


def config_with(path: str, value: Any) -> Callable[[ExportedDraft], ExportedDraft]:
    def change(draft: ExportedDraft) -> ExportedDraft:
        config = json.loads(json.dumps(draft.config))
        *parents, last = path.split(".")
        node = config
        for parent in parents:
            node = node[parent]
        node[last] = value
        return replace(draft, config=config)

    return change


def tensors_with(**changes: Any) -> Callable[[ExportedDraft], ExportedDraft]:
    def change(draft: ExportedDraft) -> ExportedDraft:
        tensors = {**draft.tensors, **{name.replace("__", "."): value for name, value in changes.items()}}
        return replace(draft, tensors={name: value for name, value in tensors.items() if value is not None})

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (config_with("model_type", "llama"), "model_type"),
        (config_with("speculators_model_type", "xpress"), "xpress"),
        (config_with("transformer_layer_config.model_type", "mistral"), "mistral"),
        (config_with("eagle_aux_hidden_state_layer_ids", [4, 2, 5]), "ascending"),
        (config_with("eagle_aux_hidden_state_layer_ids", [2, 5]), "num_aux_hidden_states"),
        (config_with("speculators_config.verifier.name_or_path", ""), "name_or_path"),
        (config_with("speculators_config.proposal_methods", []), "proposal_methods"),
        (config_with("fc_norm", True), "exclude"),
        (config_with("embed_requires_grad", True), "embed_requires_grad"),
        (config_with("surprise", 1), "surprise"),
        (tensors_with(fc__weight=None), "fc.weight is missing"),
        (tensors_with(extra__weight=torch.zeros(1).bfloat16()), "extra.weight is unknown"),
        (tensors_with(norm__weight=torch.ones(31).bfloat16()), "norm.weight is"),
        (tensors_with(norm__weight=torch.ones(32)), "float32"),
        (tensors_with(norm__weight=torch.full((32,), float("nan")).bfloat16()), "not finite"),
        (tensors_with(d2t=torch.arange(40)), "d2t and t2d disagree"),
        (tensors_with(d2t=None, t2d=None), "d2t is missing"),
    ],
)
def test_what_vllm_would_trip_over_is_named(
    verifier: Path, change: Callable[[ExportedDraft], ExportedDraft], says: str
) -> None:
    draft = exported(verifier)
    check_servable(draft)
    with pytest.raises(FormatError, match=says):
        check_servable(change(draft))


def test_a_torn_draft_is_an_error_that_says_where(verifier: Path, tmp_path: Path) -> None:
    directory = write_draft(tmp_path / "draft", exported(verifier), ModelCard(title="t"))
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(FormatError, match=r"model\.safetensors"):
        read_draft(directory)
    with pytest.raises(FormatError, match=r"config\.json"):
        read_draft(tmp_path / "nowhere")
