"""Tiny drafts as other people's code writes them: names and keys from the sources that `layouts.py` cites."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.unit.speculators_core.algorithms.tiny import HIDDEN, LAYERS, VOCAB

HEADS, KV_HEADS, HEAD_DIM, WIDE, RANK = 4, 2, 32, 48, 6
DRAFT_VOCAB = 40
KEPT = sorted(torch.randperm(VOCAB, generator=torch.Generator().manual_seed(5))[:DRAFT_VOCAB].tolist())
"""Verifier ids that a reduced draft can propose."""
QUERIES, KEYS = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM

Shapes = dict[str, tuple[int, ...]]


def filled(
    shapes: Mapping[str, tuple[int, ...]], seed: int = 0, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Tensor]:
    """Random tensors of these names and shapes."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in sorted(shapes.items())}


def write(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """A checkpoint of config.json and model.safetensors."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(dict(config)))
    save_file(dict(tensors), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def layer(prefix: str, width: int = HIDDEN, *, normed_heads: bool = False) -> Shapes:
    """A decoder layer whose attention reads rows of `width`."""
    shapes: Shapes = {
        f"{prefix}self_attn.q_proj.weight": (QUERIES, width),
        f"{prefix}self_attn.k_proj.weight": (KEYS, width),
        f"{prefix}self_attn.v_proj.weight": (KEYS, width),
        f"{prefix}self_attn.o_proj.weight": (HIDDEN, QUERIES),
        f"{prefix}mlp.gate_proj.weight": (WIDE, HIDDEN),
        f"{prefix}mlp.up_proj.weight": (WIDE, HIDDEN),
        f"{prefix}mlp.down_proj.weight": (HIDDEN, WIDE),
        f"{prefix}input_layernorm.weight": (HIDDEN,),
        f"{prefix}post_attention_layernorm.weight": (HIDDEN,),
    }
    if normed_heads:
        shapes |= {f"{prefix}self_attn.{name}_norm.weight": (HEAD_DIM,) for name in "qk"}
    return shapes


def tables(ids: list[int] = KEPT, vocab: int = VOCAB) -> dict[str, Tensor]:
    """d2t as distances, t2d as truth values."""
    d2t = torch.tensor([token - index for index, token in enumerate(ids)])
    t2d = torch.zeros(vocab, dtype=torch.bool)
    t2d[ids] = True
    return {"d2t": d2t, "t2d": t2d}


def decoder_config(**changes: Any) -> dict[str, Any]:
    """Keys that transformers 4 writes for a decoder."""
    return {
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": WIDE,
        "max_position_embeddings": 512,
        "model_type": "llama",
        "num_attention_heads": HEADS,
        "num_hidden_layers": 1,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": VOCAB,
        **changes,
    }


def eagle3_shapes(
    prefix: str = "midlayer.", *, features: int = 3, width: int = HIDDEN, layers: int = 1, normed_heads: bool = False
) -> Shapes:
    """SafeAILab's names for one layer; `layers.i.` where several are written."""
    shapes: Shapes = {
        "fc.weight": (HIDDEN, features * width),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (DRAFT_VOCAB, HIDDEN),
        f"{prefix}hidden_norm.weight": (HIDDEN,),
        **layer(prefix, 2 * HIDDEN, normed_heads=normed_heads),
    }
    for index in range(1, layers):
        shapes |= layer(f"layers.{index}.", normed_heads=normed_heads)
    return shapes


def eagle3_config(**changes: Any) -> dict[str, Any]:
    return decoder_config(
        architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=DRAFT_VOCAB, torch_dtype="float16", **changes
    )


def peagle_shapes(*, layers: int = 2) -> Shapes:
    """SpecForge's P-EAGLE: `layers.i.`, its own embedding, and the masked rows' features."""
    return {
        **eagle3_shapes("layers.0.", layers=layers),
        "embed_tokens.weight": (VOCAB, HIDDEN),
        "mask_hidden": (1, 1, 3 * HIDDEN),
    }


def block_shapes(layers: int = 2, features: int = 3) -> Shapes:
    """z-lab's backbone."""
    shapes: Shapes = {
        "fc.weight": (HIDDEN, features * HIDDEN),
        "hidden_norm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
    }
    for index in range(layers):
        shapes |= layer(f"layers.{index}.", normed_heads=True)
    return shapes


def block_config(layers: int = 2, **changes: Any) -> dict[str, Any]:
    nested = {"mask_token_id": VOCAB - 1, "target_layer_ids": [1, 3, 4], **changes.pop("dflash_config", {})}
    return decoder_config(
        architectures=["DFlashDraftModel"],
        model_type="qwen3",
        num_hidden_layers=layers,
        block_size=8,
        num_target_layers=LAYERS,
        dflash_config=nested,
        layer_types=["full_attention"] * layers,
        sliding_window=None,
        use_sliding_window=False,
        **changes,
    )


def selecting_shapes(layers: int = 2) -> Shapes:
    """z-lab's DFlash2: convolutions with 2 taps over groups of 16 channels, and a selector."""
    shapes = block_shapes(layers)
    for index in range(layers):
        for name in ("attention", "mlp"):
            shapes[f"layers.{index}.{name}_conv.base_kernel"] = (2, 2, HIDDEN)
            shapes[f"layers.{index}.{name}_conv.kernel_projection.weight"] = (4 * (HIDDEN // 16), HIDDEN)
    return shapes | {
        "candidate_selector.predecessor_codebook": (VOCAB, RANK),
        "candidate_selector.successor_codebook": (VOCAB, RANK),
        "candidate_selector.hidden_projection.weight": (RANK, HIDDEN),
    }


SELECTING = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": RANK, "selector_top_k": 4}


def corrected_shapes(head: str = "vanilla") -> Shapes:
    """DeepSpec's heads on z-lab's backbone."""
    shapes: Shapes = {
        **block_shapes(),
        "markov_head.markov_w1.weight": (VOCAB, RANK),
        "markov_head.markov_w2.weight": (VOCAB, RANK),
        "confidence_head.proj.weight": (1, HIDDEN + RANK),
        "confidence_head.proj.bias": (1,),
    }
    if head == "gated":
        shapes |= {
            "markov_head.gate_proj.weight": (RANK, HIDDEN + RANK),
            "markov_head.gate_proj.bias": (RANK,),
        }
    if head == "rnn":
        shapes |= {
            "markov_head.joint_proj.weight": (3 * RANK, 2 * RANK + HIDDEN),
            "markov_head.joint_proj.bias": (3 * RANK,),
        }
    return shapes


def deepspec_config(head: str = "vanilla") -> dict[str, Any]:
    """DeepSeek's keys, all at the top."""
    config = block_config()
    nested = config.pop("dflash_config")
    return {
        **config,
        **nested,
        "architectures": ["Qwen3DSparkModel"],
        "num_anchors": 64,
        "markov_rank": RANK,
        "markov_head_type": head,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
