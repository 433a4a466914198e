"""What vLLM 0.32 makes of a draft of anchored blocks, from its config.json alone.

Rules read off `transformers_utils/configs/speculators/algos.py`, `models/qwen3_dflash.py` and their speculators.
"""

from __future__ import annotations

from speculators_core.formats.config import (
    BlockDraftConfig,
    CorrectedBlockDraftConfig,
    RefinedBlockDraftConfig,
    SelectingBlockDraftConfig,
    SpeculatorConfig,
)
from speculators_core.formats.shapes import Shape, check_layer_config, layer_shapes


def block_draft_tensors(config: SpeculatorConfig, problems: list[str]) -> dict[str, Shape]:
    """Tensors of the backbone; embedding, and head unless the vocabulary is reduced, are the served verifier's own."""
    assert isinstance(config, BlockDraftConfig)
    layer = config.transformer_layer_config
    if not check_layer_config(layer, problems):
        return {}
    hidden, vocab, draft_vocab = layer["hidden_size"], layer["vocab_size"], config.draft_vocab_size
    if config.mask_token_id >= vocab:
        problems.append(f"mask_token_id {config.mask_token_id} lies outside the vocabulary of {vocab}")
    tensors: dict[str, Shape] = {
        "fc.weight": (hidden, len(config.aux_hidden_state_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    if draft_vocab != vocab:
        tensors |= {"lm_head.weight": (draft_vocab, hidden), "d2t": (draft_vocab,), "t2d": (vocab,)}
    for index in range(layer["num_hidden_layers"]):
        tensors |= layer_shapes(layer, index, hidden, normed_heads=True)
    return tensors


def masked_draft_tensors(config: SpeculatorConfig, problems: list[str]) -> dict[str, Shape]:
    """A draft that vLLM runs as `dflash`: one causality for all layers, masks alone draft."""
    assert isinstance(config, BlockDraftConfig)
    tensors = block_draft_tensors(config, problems)
    layer = config.transformer_layer_config
    if config.sample_from_anchor:
        problems.append("sample_from_anchor is set, but vLLM drafts this method from masks alone")
    if "full_attention" in layer.get("layer_types", ()) and not config.sliding_window_non_causal:
        problems.append(
            "a full-attention layer was trained to see its block both ways, but without sliding_window_non_causal vLLM "
            "serves every layer causally"
        )
    if tensors:
        tensors["mask_embedding"] = (layer["hidden_size"],)
    return tensors


def selecting_draft_tensors(config: SpeculatorConfig, problems: list[str]) -> dict[str, Shape]:
    """A draft that vLLM runs as `dflash` with convolutions and a selector, over the whole vocabulary."""
    assert isinstance(config, SelectingBlockDraftConfig)
    tensors = masked_draft_tensors(config, problems)
    if not tensors:
        return {}
    layer, taps, rank = config.transformer_layer_config, config.conv_kernel_size, config.selector_rank
    hidden, vocab = layer["hidden_size"], layer["vocab_size"]
    if config.draft_vocab_size != vocab:
        problems.append(f"draft_vocab_size {config.draft_vocab_size} is not the verifier's {vocab}")
    if hidden % config.conv_group_size:
        problems.append(f"conv_group_size {config.conv_group_size} does not divide the hidden size {hidden}")
    for index in range(layer["num_hidden_layers"]):
        for name in ("attention", "mlp"):
            prefix, rows = f"layers.{index}.{name}_conv.", 2 * taps * (hidden // config.conv_group_size)
            tensors[f"{prefix}base_kernel"] = (2, taps, hidden)
            tensors[f"{prefix}kernel_projection.weight"] = (rows, hidden)
    return tensors | {
        "candidate_selector.predecessor_codebook": (vocab, rank),
        "candidate_selector.successor_codebook": (vocab, rank),
        "candidate_selector.hidden_projection.weight": (rank, hidden),
    }


def refined_draft_tensors(config: SpeculatorConfig, problems: list[str]) -> dict[str, Shape]:
    """Tensors of the format; nothing in vLLM 0.32 loads them, which the algorithm's check says before training."""
    assert isinstance(config, RefinedBlockDraftConfig)
    tensors = block_draft_tensors(config, problems)
    if not tensors:
        return {}
    layer, rank, slots = config.transformer_layer_config, config.xpress_rank, config.block_size
    hidden, wide = layer["hidden_size"], config.xpress_rank * config.xpress_mlp_ratio
    shapes: dict[str, Shape] = {
        "token_embed.weight": (layer["vocab_size"], rank),
        "down_h.weight": (rank, hidden),
        "down_g.weight": (rank, hidden),
        "in_proj.weight": (rank, 3 * rank),
        "mix_l": (rank, slots, slots),
        "mlp_gate.weight": (wide, rank),
        "mlp_up.weight": (wide, rank),
        "mlp_down.weight": (rank, wide),
        "readout.weight": (config.draft_vocab_size, rank),
    }
    return tensors | {f"refiner_head.{name}": shape for name, shape in shapes.items()}


def corrected_draft_tensors(config: SpeculatorConfig, problems: list[str]) -> dict[str, Shape]:
    """A draft that vLLM runs as `dspark`: sliding layers causal, full ones not, unless `is_causal` says otherwise."""
    assert isinstance(config, CorrectedBlockDraftConfig)
    tensors = block_draft_tensors(config, problems)
    layer, rank = config.transformer_layer_config, config.markov_rank
    sliding = "sliding_attention" in layer.get("layer_types", ())
    if sliding and config.sliding_window_non_causal and layer.get("is_causal") is not False:
        problems.append(
            "vLLM does not read sliding_window_non_causal of this method: set is_causal in the layer config"
        )
    if not tensors:
        return {}
    hidden, vocab, draft_vocab = layer["hidden_size"], layer["vocab_size"], config.draft_vocab_size
    if rank:
        tensors |= {
            "markov_head.markov_w1.weight": (vocab, rank),
            "markov_head.markov_w2.weight": (draft_vocab, rank),
        }
    if rank and config.markov_head_type == "gated":
        tensors |= {
            "markov_head.gate_proj.weight": (rank, hidden + rank),
            "markov_head.gate_proj.bias": (rank,),
        }
    if rank and config.markov_head_type == "rnn":
        tensors |= {
            "markov_head.joint_proj.weight": (3 * rank, 2 * rank + hidden),
            "markov_head.joint_proj.bias": (3 * rank,),
        }
    if config.enable_confidence_head:
        width = hidden + (rank if config.confidence_head_with_markov else 0)
        tensors |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
    return tensors
