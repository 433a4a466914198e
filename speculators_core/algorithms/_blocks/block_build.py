"""A fresh draft of anchored blocks for a verifier: trainable parts drawn from a seed, frozen parts borrowed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from speculators_core.algorithms._blocks.aux_layers import chosen_layers
from speculators_core.algorithms._blocks.block_draft import BlockDraft
from speculators_core.algorithms._blocks.block_knobs import BlockKnobs
from speculators_core.algorithms._blocks.borrowed import Borrowed, borrow, reduced_vocabulary
from speculators_core.algorithms._blocks.feature_build import draw_linear
from speculators_core.algorithms._blocks.geometry import LayerGeometry, geometry_for
from speculators_core.algorithms._blocks.mask_token import resolve_mask_token
from speculators_core.algorithms._blocks.vocabulary import ReducedVocabulary
from speculators_core.verifier.facts import VerifierFacts, read_facts

if TYPE_CHECKING:
    from speculators_core.data.vocabulary import DraftVocabulary

Draft = TypeVar("Draft", bound=BlockDraft)
Make = Callable[[VerifierFacts, LayerGeometry, int, ReducedVocabulary | None, int], Draft]
"""The module itself, from (facts, geometry, number of features, vocabulary, mask token)."""
SPREAD = 8.0
"""Most that fresh logits may spread by: a verifier's own do by less, and what starts above learns to unsay it first."""
_ROWS = 4096
"""Rows of a head that are enough to know its size."""


def build_block_draft(
    knobs: BlockKnobs,
    verifier_dir: Path,
    draft_vocabulary: DraftVocabulary | None,
    seed: int,
    make: Make[Draft],
) -> Draft:
    """A draft of that shape on the CPU: float32 where it is trained, bfloat16 where it is frozen.

    Linear weights are N(0, initializer_range), norms 1; embedding and head are the verifier's. So the last norm starts
    as the verifier's, which is made for that head (not with `compat`): Adam moves a weight by its rate, whatever the
    gradient, and masks have a long way to go. It is made smaller where fresh logits would spread by more than SPREAD.

    Raises:
        ConfigError: layers, vocabulary or mask token that this verifier does not have.
        VerifierError: the directory cannot be used.
    """
    verifier_dir = Path(verifier_dir)
    facts = read_facts(verifier_dir)
    geometry = geometry_for(
        facts,
        style="qwen3",  # vLLM's layers for blocks norm their heads, whatever the verifier's do
        num_layers=knobs.layers,
        sliding_window=knobs.sliding_window,
        full_attention_layers=knobs.full_attention_indices,
        intermediate_size=knobs.intermediate_size,
    )
    vocabulary = reduced_vocabulary(draft_vocabulary, facts.vocab_size)
    ids = chosen_layers(knobs.aux_layers, facts.num_hidden_layers)
    mask = resolve_mask_token(verifier_dir, facts, knobs.mask_token_id, trusted=True)
    model = make(facts, geometry, len(ids), vocabulary, mask)
    model.aux_layer_ids, model.verifier_architectures = ids, facts.architectures
    draw_linear(model, geometry.initializer_range, seed)
    model.draw_heads(torch.Generator().manual_seed(seed + 1))
    parts = borrow(verifier_dir, facts, vocabulary)
    model.borrow(parts.embed_VH, parts.head_DH)
    model.teacher = parts.teacher
    if not knobs.compat:
        model.norm.load_state_dict({"weight": _bounded(parts, model.draft_logit_scale)})
    return model


def _bounded(parts: Borrowed, logit_scale: float) -> Tensor:
    """The verifier's last norm [H], by which logits of random states spread by SPREAD at most."""
    norm_H = parts.teacher.norm_weight_H
    some_DH = parts.head_DH[:: -(-parts.head_DH.shape[0] // _ROWS)].float()
    spread = logit_scale * float((some_DH * norm_H).norm(dim=-1).mean())
    return norm_H * min(1.0, SPREAD / spread)
