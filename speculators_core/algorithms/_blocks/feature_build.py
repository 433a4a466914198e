"""A fresh feature draft for a verifier: trainable parts drawn from a seed, frozen parts borrowed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from speculators_core.algorithms._blocks.aux_layers import chosen_layers
from speculators_core.algorithms._blocks.borrowed import borrow, reduced_vocabulary
from speculators_core.algorithms._blocks.feature_draft import FeatureDraft
from speculators_core.algorithms._blocks.feature_knobs import FeatureKnobs
from speculators_core.algorithms._blocks.geometry import LayerGeometry, geometry_for
from speculators_core.algorithms._blocks.vocabulary import ReducedVocabulary
from speculators_core.verifier.facts import VerifierFacts, read_facts

if TYPE_CHECKING:
    from speculators_core.data.vocabulary import DraftVocabulary

Draft = TypeVar("Draft", bound=FeatureDraft)


def build_feature_draft(
    knobs: FeatureKnobs,
    verifier_dir: Path,
    draft_vocabulary: DraftVocabulary | None,
    seed: int,
    make: Callable[[VerifierFacts, LayerGeometry, int, ReducedVocabulary | None], Draft],
) -> Draft:
    """A draft of that shape on the CPU: float32 where it is trained, bfloat16 where it is frozen.

    Linear weights are N(0, initializer_range), norms 1; embedding and head are the verifier's. The last norm starts
    so small that fresh logits vary by about one: random certainty only costs steps to unlearn (with SmolLM2-135M
    the first gradients are a seventh, the loss after 64 steps is 6 % lower). Not with `compat`.

    Args:
        make: the module itself, from (facts, geometry, number of features, vocabulary).

    Raises:
        ConfigError: layers or vocabulary that this verifier does not have.
        VerifierError: the directory cannot be used.
    """
    verifier_dir = Path(verifier_dir)
    facts = read_facts(verifier_dir)
    geometry = geometry_for(
        facts,
        style=knobs.style,
        num_layers=knobs.layers,
        sliding_window=knobs.sliding_window,
        full_attention_layers=knobs.full_attention_layers,
        intermediate_size=knobs.intermediate_size,
    )
    vocabulary = reduced_vocabulary(draft_vocabulary, facts.vocab_size)
    ids = chosen_layers(knobs.aux_layers, facts.num_hidden_layers)
    model = make(facts, geometry, len(ids), vocabulary)
    model.aux_layer_ids, model.verifier_architectures = ids, facts.architectures
    draw_linear(model, geometry.initializer_range, seed)
    parts = borrow(verifier_dir, facts, vocabulary)
    model.borrow(parts.embed_VH, parts.head_DH)
    model.teacher = parts.teacher
    if not knobs.compat:
        nn.init.constant_(model.norm.weight, 1.0 / float(parts.head_DH.float().norm(dim=-1).mean()))
    return model


@torch.no_grad()
def draw_linear(model: nn.Module, deviation: float, seed: int) -> None:
    """Every linear weight that is not borrowed: N(0, deviation) from the seed, in the order of the modules."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.Linear) and not module.weight.is_meta:
            module.weight.normal_(0.0, deviation, generator=generator)
