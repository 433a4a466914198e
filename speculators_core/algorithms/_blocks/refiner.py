"""A bias of a block's logits by the tokens before, mixed causally along the block, refined round by round."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class BlockRefiner(nn.Module):
    """bias = R · u, where u joins a slot's state, the block's mean state and the token before, in r dimensions.

    u = W_in [D_h h; D_g mean(h); E[previous]], then u_k ← u_k + Σ_{j ≤ k} M[k, j] ⊙ u_j, then a gated feed-forward
    part.

    Args:
        vocab_size: V, verifier tokens that may come before.
        draft_size: D, tokens that the bias is for.
        rank: r.
        hidden_size: H.
        mlp_ratio: width of the feed-forward part in units of r.
        block_size: B.
    """

    def __init__(
        self, vocab_size: int, draft_size: int, rank: int, hidden_size: int, mlp_ratio: int, block_size: int
    ) -> None:
        super().__init__()
        self.token_embed = nn.Embedding(vocab_size, rank)
        self.down_h = nn.Linear(hidden_size, rank, bias=False)
        self.down_g = nn.Linear(hidden_size, rank, bias=False)
        self.in_proj = nn.Linear(3 * rank, rank, bias=False)
        self.mix_l = nn.Parameter(torch.zeros(rank, block_size, block_size))
        self.mlp_gate = nn.Linear(rank, rank * mlp_ratio, bias=False)
        self.mlp_up = nn.Linear(rank, rank * mlp_ratio, bias=False)
        self.mlp_down = nn.Linear(rank * mlp_ratio, rank, bias=False)
        self.readout = nn.Linear(rank, draft_size, bias=False)
        self.readout.weight.is_vocabulary = True  # type: ignore[attr-defined]

    @torch.no_grad()
    def draw(self, deviation: float, generator: torch.Generator) -> None:
        """A fresh embedding, and slots that do not mix yet."""
        self.token_embed.weight.normal_(0.0, deviation, generator=generator)
        self.mix_l.zero_()

    def states(self, hidden_MBH: Tensor) -> Tensor:
        """[M, B, 2r]: what a block's states give to u, the same in every round."""
        own = self.down_h(hidden_MBH)
        whole = self.down_g(hidden_MBH.mean(dim=1, keepdim=True))
        return torch.cat((own, whole.expand_as(own)), dim=-1)

    def forward(self, states_MBC: Tensor, previous_MB: Tensor) -> Tensor:
        """u [M, B, r] given the verifier ids of the tokens before."""
        embedded = self.token_embed(previous_MB).to(states_MBC.dtype)
        u = self.in_proj(torch.cat((states_MBC, embedded), dim=-1))
        u = u + torch.einsum("ckj,mjc->mkc", self.mix_l.tril(), u)
        result: Tensor = u + self.mlp_down(functional.silu(self.mlp_gate(u)) * self.mlp_up(u))
        return result
