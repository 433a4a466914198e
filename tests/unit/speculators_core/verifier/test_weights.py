"""Embedding, head and norm by exact key; anything that cannot be read as it is, is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from speculators_core.errors import VerifierError
from speculators_core.verifier.weights import read_head

from .test_facts import LLAMA

V, H = LLAMA["vocab_size"], LLAMA["hidden_size"]


def tensors(prefix: str = "model.", head: str | None = "lm_head.weight") -> dict[str, torch.Tensor]:
    named = {
        f"{prefix}embed_tokens.weight": torch.randn(V, H).to(torch.bfloat16),
        f"{prefix}norm.weight": torch.randn(H).to(torch.bfloat16),
        f"{prefix}layers.0.mlp.up_proj.weight": torch.randn(8, H),
    }
    return named | ({head: torch.randn(V, H).to(torch.bfloat16)} if head else {})


def verifier(directory: Path, named: dict[str, torch.Tensor], **config: object) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(LLAMA | config))
    save_file(named, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize(
    ("prefix", "head"),
    [
        ("model.", "lm_head.weight"),
        ("model.language_model.", "lm_head.weight"),
        ("language_model.model.", "language_model.lm_head.weight"),
    ],
)
def test_known_names(tmp_path: Path, prefix: str, head: str) -> None:
    named = tensors(prefix, head)
    read = read_head(verifier(tmp_path / "v", named))
    assert torch.equal(read.embed_VH, named[f"{prefix}embed_tokens.weight"]) and read.embed_VH.dtype == torch.bfloat16
    assert torch.equal(read.head_VH, named[head]) and not read.tied
    assert torch.equal(read.norm_H, named[f"{prefix}norm.weight"])


def test_tied_heads_are_the_embedding_unless_another_matrix_is_stored(tmp_path: Path) -> None:
    """As vLLM 0.32 and transformers 5.19 decide it: a copy is tied, another head counts, whatever config.json says."""
    named = tensors(head=None)
    copied = named | {"lm_head.weight": named["model.embed_tokens.weight"].clone()}
    for stored in (named, copied):
        read = read_head(verifier(tmp_path / "v", stored, tie_word_embeddings=True))
        assert read.tied and read.head_VH is read.embed_VH
    other = tensors()
    read = read_head(verifier(tmp_path / "v", other, tie_word_embeddings=True))
    assert not read.tied and torch.equal(read.head_VH, other["lm_head.weight"])


def test_sharded_index(tmp_path: Path) -> None:
    named = tensors()
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    weight_map = {name: f"model-{i:05d}-of-00004.safetensors" for i, name in enumerate(named, start=1)}
    for name, file in weight_map.items():
        save_file({name: named[name]}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(read_head(tmp_path).head_VH, named["lm_head.weight"])
    (tmp_path / weight_map["model.layers.0.mlp.up_proj.weight"]).unlink()
    with pytest.raises(VerifierError, match="lacks model-00003") as caught:
        read_head(tmp_path)
    assert caught.value.mend


@pytest.mark.parametrize("suffix", ["qweight", "weight_packed", "weight_scale"])
def test_a_packed_head_is_never_replaced_by_the_embedding(tmp_path: Path, suffix: str) -> None:
    named = tensors(head=None) | {f"lm_head.{suffix}": torch.ones(4, dtype=torch.int32)}
    with pytest.raises(VerifierError, match="quantised or packed") as caught:
        read_head(verifier(tmp_path / "v", named))
    assert caught.value.mend


def test_refusals_name_the_reason(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, torch.Tensor], str]] = [
        (tensors() | {"lm_head.weight": torch.zeros(V, H, dtype=torch.float8_e4m3fn)}, "stored as F8_E4M3"),
        (tensors() | {"lm_head.bias": torch.zeros(V)}, "has a bias"),
        (tensors(head=None), "no output head"),
        (tensors() | {"lm_head.weight": torch.zeros(V - 1, H)}, "config.json implies"),
        (tensors() | {"model.norm.weight": torch.zeros(H + 1)}, "config.json implies"),
        (tensors() | {"model.language_model.norm.weight": torch.zeros(H)}, "several tensors"),
    ]
    for named, words in cases:
        with pytest.raises(VerifierError, match=words):
            read_head(verifier(tmp_path / "v", named))


def test_padded_matrices_are_cut_to_the_vocabulary(tmp_path: Path) -> None:
    named = tensors() | {"lm_head.weight": torch.randn(V + 32, H)}
    assert torch.equal(read_head(verifier(tmp_path / "v", named)).head_VH, named["lm_head.weight"][:V])


def test_other_formats_and_torn_files_teach(tmp_path: Path) -> None:
    directory = verifier(tmp_path / "v", tensors())
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(VerifierError, match="torn"):
        read_head(directory)
    file.rename(directory / "pytorch_model.bin")
    with pytest.raises(VerifierError, match=r"only pytorch_model\.bin") as caught:
        read_head(directory)
    assert caught.value.mend and "pickled" in caught.value.mend
