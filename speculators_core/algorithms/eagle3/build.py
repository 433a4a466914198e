"""A fresh draft for a verifier: trainable parts drawn from a seed, frozen parts borrowed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from speculators_core.algorithms._blocks.geometry import geometry_for
from speculators_core.algorithms._blocks.teacher import Teacher
from speculators_core.algorithms._blocks.vocabulary import checked_vocabulary
from speculators_core.algorithms.eagle3.config import Eagle3Config, aux_layers
from speculators_core.algorithms.eagle3.model import Eagle3Draft
from speculators_core.verifier.facts import read_facts
from speculators_core.verifier.weights import read_head

if TYPE_CHECKING:
    from speculators_core.data.vocabulary import DraftVocabulary


def build(config: Eagle3Config, verifier_dir: Path, draft_vocabulary: DraftVocabulary | None, seed: int) -> Eagle3Draft:
    """A draft of that shape on the CPU: float32 where it is trained, bfloat16 where it is frozen.

    Linear weights are N(0, initializer_range), norms 1; embedding and head are the verifier's. The last norm starts
    so small that fresh logits vary by about one: random certainty only costs steps to unlearn (with SmolLM2-135M
    the first gradients are a seventh, the loss after 64 steps is 6 % lower). Not with `compat`.

    Raises:
        ConfigError: layers or vocabulary that this verifier does not have.
        VerifierError: the directory cannot be used.
    """
    verifier_dir = Path(verifier_dir)
    facts = read_facts(verifier_dir)
    geometry = geometry_for(
        facts,
        style=config.style,
        num_layers=config.layers,
        sliding_window=config.sliding_window,
        full_attention_layers=config.full_attention_layers,
        intermediate_size=config.intermediate_size,
    )
    vocabulary = None
    if draft_vocabulary is not None:
        vocabulary = checked_vocabulary(
            torch.as_tensor(draft_vocabulary.d2t), torch.as_tensor(draft_vocabulary.t2d), facts.vocab_size
        )
    ids = aux_layers(config, facts.num_hidden_layers)
    model = Eagle3Draft(config, geometry, len(ids), vocabulary, draft_logit_scale=facts.logit_scale)
    model.aux_layer_ids, model.verifier_architectures = ids, facts.architectures
    _draw(model, geometry.initializer_range, seed)
    head = read_head(verifier_dir, facts)
    embed_VH = _narrow(head.embed_VH)
    head_VH = embed_VH if head.tied else _narrow(head.head_VH)
    head_DH = head_VH if vocabulary is None else head_VH[vocabulary.verifier_ids_D]
    model.borrow(embed_VH, head_DH)
    if not config.compat:
        nn.init.constant_(model.norm.weight, 1.0 / float(head_DH.float().norm(dim=-1).mean()))
    model.teacher = Teacher(
        head.norm_H.float(),
        head_DH,
        eps=facts.rms_norm_eps,
        convention=facts.norm_convention,
        softcap=facts.final_logit_softcap,
        scale=facts.logit_scale,
    )
    return model


@torch.no_grad()
def _draw(model: Eagle3Draft, deviation: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.Linear) and not module.weight.is_meta:
            module.weight.normal_(0.0, deviation, generator=generator)


def _narrow(tensor: Tensor) -> Tensor:
    """Frozen tables are served in bfloat16, so nothing is gained by keeping more."""
    return tensor.to(torch.bfloat16)
