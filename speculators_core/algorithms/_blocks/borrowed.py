"""What a draft borrows from its verifier: embedding, vocabulary head, and the teacher made of head and final norm."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from speculators_core.algorithms._blocks.teacher import Teacher
from speculators_core.algorithms._blocks.vocabulary import ReducedVocabulary, checked_vocabulary
from speculators_core.verifier.facts import VerifierFacts
from speculators_core.verifier.weights import read_head

if TYPE_CHECKING:
    from speculators_core.data.vocabulary import DraftVocabulary


@dataclass(frozen=True)
class Borrowed:
    """embed_VH bfloat16 [V, H] · head_DH bfloat16 [D, H], rows that the draft can propose · the teacher over them."""

    embed_VH: Tensor
    head_DH: Tensor
    teacher: Teacher


def borrow(verifier_dir: Path, facts: VerifierFacts, vocabulary: ReducedVocabulary | None) -> Borrowed:
    """Read them, in bfloat16: that is how they are served, so nothing is gained by keeping more.

    Raises:
        VerifierError: a tensor is missing, quantised, or of another shape.
    """
    head = read_head(verifier_dir, facts)
    embed_VH = head.embed_VH.to(torch.bfloat16)
    head_VH = embed_VH if head.tied else head.head_VH.to(torch.bfloat16)
    head_DH = head_VH if vocabulary is None else head_VH[vocabulary.verifier_ids_D]
    teacher = Teacher(
        head.norm_H.float(),
        head_DH,
        eps=facts.rms_norm_eps,
        convention=facts.norm_convention,
        softcap=facts.final_logit_softcap,
        scale=facts.logit_scale,
    )
    return Borrowed(embed_VH, head_DH, teacher)


def reduced_vocabulary(chosen: DraftVocabulary | None, vocab_size: int) -> ReducedVocabulary | None:
    """The run's draft vocabulary as tensors; None where it is the verifier's own. ConfigError when it does not fit."""
    if chosen is None:
        return None
    return checked_vocabulary(torch.as_tensor(chosen.d2t), torch.as_tensor(chosen.t2d), vocab_size)
