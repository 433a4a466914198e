"""A draft's reduced vocabulary: which verifier tokens it can propose, as vLLM wants it told."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from speculators_core.errors import ConfigError


@dataclass(frozen=True)
class ReducedVocabulary:
    """d2t int64 [D]: verifier id − draft id, a distance · t2d bool [V]: whether the draft can propose the token."""

    d2t: Tensor
    t2d: Tensor

    @property
    def verifier_ids_D(self) -> Tensor:
        """Verifier id of each draft id, ascending."""
        return torch.arange(self.d2t.numel(), device=self.d2t.device) + self.d2t

    @property
    def draft_size(self) -> int:
        """D."""
        return self.d2t.numel()


def checked_vocabulary(d2t: Tensor, t2d: Tensor, verifier_size: int) -> ReducedVocabulary | None:
    """The vocabulary, or None when it is the verifier's own (vLLM then wants no mapping at all).

    Raises:
        ConfigError: the two tensors disagree, or do not belong to this verifier.
    """
    vocabulary = ReducedVocabulary(d2t.to(torch.int64), t2d.to(torch.bool))
    ids = vocabulary.verifier_ids_D
    sound = (
        t2d.numel() == verifier_size
        and 0 < d2t.numel() <= verifier_size
        and bool((ids[1:] > ids[:-1]).all())
        and int(ids[0]) >= 0
        and torch.equal(ids, vocabulary.t2d.nonzero().squeeze(1))
    )
    if not sound:
        raise ConfigError(
            f"the draft vocabulary ({d2t.numel()} of {t2d.numel()} tokens) does not fit a verifier with "
            f"{verifier_size} tokens",
            mend="select the draft vocabulary again for this verifier",
        )
    return None if vocabulary.draft_size == verifier_size else vocabulary
