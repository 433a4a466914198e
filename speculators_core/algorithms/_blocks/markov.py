"""A low-rank bias of the draft's logits by the token before: what a block drafted at once cannot know by itself."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

MarkovKind = Literal["vanilla", "gated", "rnn"]


class MarkovHead(nn.Module):
    """bias = W2 · f, with f made of the embedding W1[previous token], and of the state where the kind says so.

    Args:
        vocab_size: V, verifier tokens that may come before.
        draft_size: D, tokens that the bias is for.
        rank: r.
        hidden_size: H.
        kind: vanilla: f is the embedding · gated: a gate over state and embedding scales it · rnn: a state runs along
            the block, so that f depends on all tokens before.
    """

    def __init__(self, vocab_size: int, draft_size: int, rank: int, hidden_size: int, kind: MarkovKind) -> None:
        super().__init__()
        self.rank, self.kind = rank, kind
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_size, bias=False)
        self.markov_w2.weight.is_vocabulary = True  # type: ignore[attr-defined]
        if kind == "gated":
            self.gate_proj = nn.Linear(hidden_size + rank, rank)
        elif kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    @torch.no_grad()
    def draw(self, generator: torch.Generator) -> None:
        """A fresh head: W1 is N(0, 0.01), W2 uniform within 1/√r, so that it starts next to nothing."""
        self.markov_w1.weight.normal_(0.0, 0.01, generator=generator)
        bound = self.rank**-0.5
        self.markov_w2.weight.uniform_(-bound, bound, generator=generator)
        for layer in self.children():
            if isinstance(layer, nn.Linear) and layer.bias is not None:
                layer.bias.zero_()

    def embed(self, previous: Tensor) -> Tensor:
        """[...] verifier ids to [..., r]."""
        result: Tensor = self.markov_w1(previous)
        return result

    def forward(self, embedded_MBr: Tensor, hidden_MBH: Tensor) -> Tensor:
        """f [M, B, r] of the slots of blocks, whose bias is W2 · f."""
        if self.kind == "vanilla":
            return embedded_MBr
        if self.kind == "gated":
            gate: Tensor = torch.sigmoid(self.gate_proj(torch.cat((hidden_MBH, embedded_MBr), dim=-1)))
            return gate * embedded_MBr
        state = torch.zeros_like(embedded_MBr[:, 0])
        outputs = []
        for embedded, hidden in zip(embedded_MBr.unbind(1), hidden_MBH.unbind(1), strict=True):
            gate, candidate, output = self.joint_proj(torch.cat((state, embedded, hidden), dim=-1)).chunk(3, dim=-1)
            gate = torch.sigmoid(gate)
            state = gate * state + (1.0 - gate) * torch.tanh(candidate)
            outputs.append(torch.tanh(output))
        return torch.stack(outputs, dim=1)


class ConfidenceHead(nn.Module):
    """The chance that a slot's token is accepted, as one logit; in float32, as it is served."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)

    @torch.no_grad()
    def draw(self) -> None:
        """A fresh head's bias is zero."""
        self.proj.bias.zero_()

    def forward(self, features: Tensor) -> Tensor:
        """[..., width] to float32 [...]."""
        with torch.autocast(features.device.type, enabled=False):
            result: Tensor = self.proj(features.to(self.proj.weight.dtype)).squeeze(-1)
        return result
