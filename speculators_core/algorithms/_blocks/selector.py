"""Choosing among a slot's best tokens by the token before: a low-rank score of transitions."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class CandidateSelector(nn.Module):
    """score(c | previous, h) = logit(c) + ⟨P[previous] ⊙ U·h, S[c]⟩ over a few candidates c.

    Args:
        vocab_size: V.
        hidden_size: H.
        rank: r of the codebooks P and S.
    """

    def __init__(self, vocab_size: int, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)
        for table in (self.predecessor_codebook, self.successor_codebook):
            table.is_vocabulary = True  # type: ignore[attr-defined]

    @torch.no_grad()
    def draw(self, deviation: float, generator: torch.Generator) -> None:
        """Fresh codebooks."""
        self.predecessor_codebook.normal_(0.0, deviation, generator=generator)
        self.successor_codebook.normal_(0.0, deviation, generator=generator)

    def forward(self, logits_NK: Tensor, candidates_NK: Tensor, previous_N: Tensor, hidden_NH: Tensor) -> Tensor:
        """Scores [N, K] in the logits' dtype.

        Args:
            logits_NK: the draft's logits of the candidates.
            candidates_NK, previous_N: verifier ids.
            hidden_NH: normalised states.
        """
        context_Nr = functional.embedding(previous_N, self.predecessor_codebook) * self.hidden_projection(hidden_NH)
        successors_NKr = functional.embedding(candidates_NK, self.successor_codebook)
        with torch.autocast(hidden_NH.device.type, enabled=False):
            wide = logits_NK.dtype
            transitions_NK = (successors_NKr.to(wide) @ context_Nr.to(wide)[:, :, None]).squeeze(-1)
        scores_NK: Tensor = logits_NK + transitions_NK
        return scores_NK


def candidate_logits(hidden_NH: Tensor, head_DH: Tensor, candidates_NK: Tensor) -> Tensor:
    """The draft's logits [N, K] of a few tokens each, at least float32; the gradient is that of the states."""
    with torch.autocast(hidden_NH.device.type, enabled=False):
        rows_NKH = functional.embedding(candidates_NK, head_DH.to(hidden_NH.dtype))
        wide = torch.promote_types(hidden_NH.dtype, torch.float32)
        return (rows_NKH @ hidden_NH[:, :, None]).squeeze(-1).to(wide)


def with_target(candidates_NK: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Candidates that hold the target: where it is not among them, it takes the last one's place.

    Returns:
        candidates int64 [N, K] · place of the target int64 [N] · bool [N]: it was among them.
    """
    hits_NK = candidates_NK == target_N[:, None]
    present_N = hits_NK.any(dim=1)
    last = candidates_NK.shape[1] - 1
    place_N = torch.where(present_N, hits_NK.int().argmax(dim=1), last)
    return candidates_NK.scatter(1, place_N[:, None], target_N[:, None]), place_N, present_N
