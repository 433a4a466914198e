"""A verifier small enough to write by hand, and drafts of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from speculators_core.types import Batch, Sample

HIDDEN, VOCAB, LAYERS = 32, 96, 8


@dataclass(frozen=True)
class Vocabulary:
    d2t: Tensor
    t2d: Tensor


def write_verifier(directory: Path, *, seed: int = 7, **changes: Any) -> Path:
    """config.json and the three tensors that a draft borrows."""
    directory.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "vocab_size": VOCAB,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        **changes,
    }
    (directory / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=generator).bfloat16(),
        "lm_head.weight": torch.randn(VOCAB, HIDDEN, generator=generator).bfloat16(),
        "model.norm.weight": (torch.rand(HIDDEN, generator=generator) + 0.5).bfloat16(),
    }
    if config["tie_word_embeddings"]:
        del tensors["lm_head.weight"]  # a head that lay there would count
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def vocabulary(size: int = 40) -> Vocabulary:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randperm(VOCAB, generator=generator)[:size].sort().values
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[ids] = True
    return Vocabulary(ids - torch.arange(size), t2d)


def sample(length: int, mask: list[tuple[int, int]], *, num_aux: int = 3, seed: int = 0) -> Sample:
    """A captured row; `mask` lists the [begin, end) of replies."""
    generator = torch.Generator().manual_seed(seed)
    loss_mask = torch.zeros(length, dtype=torch.bool)
    for begin, end in mask:
        loss_mask[begin:end] = True
    return Sample(
        input_ids=torch.randint(0, VOCAB, (length,), generator=generator),
        loss_mask=loss_mask,
        hidden_states=torch.randn(length, num_aux + 1, HIDDEN, generator=generator),
        position_ids=torch.arange(length),
        row=seed,
    )


def pack(aligned: list[Any], total: int) -> Batch:
    """Aligned rows one after the other, padding behind."""
    parts = {name: [getattr(row, name) for row in aligned] for name in vars(aligned[0])}
    used = sum(row.input_ids.numel() for row in aligned)
    documents = [torch.full((row.input_ids.numel(),), number) for number, row in enumerate(aligned)]
    pad = total - used

    def joined(name: str) -> Tensor:
        whole = torch.cat(parts[name])
        return torch.cat([whole, whole.new_zeros(pad, *whole.shape[1:])])

    return Batch(
        input_ids=joined("input_ids"),
        loss_mask=joined("loss_mask"),
        position_ids=joined("position_ids"),
        document_ids=torch.cat([*documents, torch.full((pad,), -1)]),
        aux_TAH=joined("aux_TAH"),
        last_TH=joined("last_TH"),
    )
