"""Distances between the draft's and the verifier's next-token distributions, with their gradients in closed form.

Notation: z_q, z_p logits of draft and verifier, q, p their softmax, α = Σ min(p, q) the chance that speculative
sampling accepts. Every function returns the loss of each row and its gradient with respect to z_q; the verifier's
side is never differentiated. All inputs and outputs are float32 (or float64), whatever the model computes in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cached_property

import torch
from torch import Tensor

ACCEPTANCE_FLOOR = 1e-5
"""`nla` is −ln max(α, floor): a row without overlap has no gradient instead of an infinite one."""
HYBRID_RATE = 3.0
"""`lk_hybrid` moves from KL to TV as exp(−rate·α)."""


class Distribution:
    """Logits with everything that several losses ask of them, computed once.

    Args:
        logits_ND: [N, D] float32; must not be changed afterwards.
    """

    def __init__(self, logits_ND: Tensor) -> None:
        self.logits_ND = logits_ND

    @cached_property
    def probs_ND(self) -> Tensor:
        """Softmax of the logits."""
        return torch.softmax(self.logits_ND, dim=-1)

    @cached_property
    def top_N(self) -> Tensor:
        """Index of the largest logit, the first one on ties."""
        return self.logits_ND.argmax(dim=-1)

    @cached_property
    def peak_N(self) -> Tensor:
        """The largest logit: far cheaper to find than where it is."""
        return self.logits_ND.amax(dim=-1)

    @cached_property
    def lse_N(self) -> Tensor:
        """log Σ exp(logits): the top logit minus its log-probability, which saves a second pass of exponentials."""
        return self.peak_N - self.probs_ND.amax(dim=-1).log()

    @cached_property
    def log_probs_ND(self) -> Tensor:
        """Logarithm of the probabilities; finite wherever the logits are."""
        return self.logits_ND - self.lse_N[:, None]

    @cached_property
    def negentropy_N(self) -> Tensor:
        """Σ p ln p."""
        mean_N: Tensor = torch.linalg.vecdot(self.probs_ND, self.logits_ND)
        return mean_N - self.lse_N

    def agrees_N(self, other: Distribution) -> Tensor:
        """bool [N]: whether `top_N` is the other's; looks for it only in rows where the two can agree."""
        agrees_N = self.logits_ND.gather(1, other.top_N[:, None]).squeeze(1) == self.peak_N
        rows = agrees_N.nonzero().squeeze(1)
        agrees_N[rows] = self.logits_ND[rows].argmax(dim=-1) == other.top_N[rows]  # ties: the first one counts
        return agrees_N


class Pair:
    """Draft and verifier at the same positions, with the quantities that several losses share.

    Args:
        hard_N: the one token that `ce` wants; None for the verifier's best.
    """

    def __init__(self, draft: Distribution, verifier: Distribution, hard_N: Tensor | None = None) -> None:
        self.draft = draft
        self.verifier = verifier
        self._hard_N = hard_N

    @property
    def hard_N(self) -> Tensor:
        """The one token that `ce` wants."""
        return self.verifier.top_N if self._hard_N is None else self._hard_N

    @cached_property
    def below_ND(self) -> Tensor:
        """q where q ≤ p, else 0: the part of the draft that acceptance can grow with."""
        return torch.where(self.draft.probs_ND <= self.verifier.probs_ND, self.draft.probs_ND, 0.0)

    @cached_property
    def acceptance_N(self) -> Tensor:
        """α = Σ min(p, q), the acceptance rate of speculative sampling (arXiv 2211.17192)."""
        return torch.minimum(self.draft.probs_ND, self.verifier.probs_ND).sum(dim=-1)

    @cached_property
    def tv_grad_ND(self) -> Tensor:
        """d(1 − α)/dz_q."""
        q_ND = self.draft.probs_ND
        return q_ND * self.below_ND.sum(dim=-1, keepdim=True) - self.below_ND

    @cached_property
    def kl_N(self) -> Tensor:
        """KL(p ‖ q)."""
        p = self.verifier
        mean_N: Tensor = torch.linalg.vecdot(p.probs_ND, self.draft.logits_ND)
        return p.negentropy_N - mean_N + self.draft.lse_N


LossAndGradient = tuple[Tensor, Tensor]


def kl_div(pair: Pair) -> LossAndGradient:
    """Σ p ln(p/q); gradient q − p."""
    return pair.kl_N, pair.draft.probs_ND - pair.verifier.probs_ND


def rkl(pair: Pair) -> LossAndGradient:
    """Σ q ln(q/p); gradient q(ln(q/p) − loss)."""
    ratio_ND = pair.draft.log_probs_ND - pair.verifier.log_probs_ND
    loss_N = torch.linalg.vecdot(pair.draft.probs_ND, ratio_ND)
    return loss_N, pair.draft.probs_ND * (ratio_ND - loss_N[:, None])


def jsd(pair: Pair) -> LossAndGradient:
    """½KL(p ‖ m) + ½KL(q ‖ m) with m = (p + q)/2; gradient ½q(ln(q/m) − KL(q ‖ m))."""
    p, q = pair.verifier, pair.draft
    log_m_ND = torch.logaddexp(p.log_probs_ND, q.log_probs_ND) - math.log(2.0)
    to_m_ND = q.log_probs_ND - log_m_ND
    q_to_m_N = torch.linalg.vecdot(q.probs_ND, to_m_ND)
    p_to_m_N = torch.linalg.vecdot(p.probs_ND, p.log_probs_ND - log_m_ND)
    return 0.5 * (p_to_m_N + q_to_m_N), 0.5 * q.probs_ND * (to_m_ND - q_to_m_N[:, None])


def ce(pair: Pair) -> LossAndGradient:
    """−ln q of the verifier's favourite token, or of the one given; gradient q − onehot."""
    target_N1 = pair.hard_N[:, None]
    loss_N = pair.draft.lse_N - pair.draft.logits_ND.gather(1, target_N1).squeeze(1)
    grad_ND = pair.draft.probs_ND.clone()
    grad_ND.scatter_add_(1, target_N1, grad_ND.new_full(target_N1.shape, -1.0))
    return loss_N, grad_ND


def tv(pair: Pair) -> LossAndGradient:
    """1 − α, the chance of a rejection; gradient −q(1[q ≤ p] − Σ_{q ≤ p} q)."""
    return 1.0 - pair.acceptance_N, pair.tv_grad_ND


def nla(pair: Pair) -> LossAndGradient:
    """−ln max(α, 1e-5); gradient of the total variation divided by α, zero below the floor."""
    alpha_N = pair.acceptance_N
    floored_N = alpha_N.clamp_min(ACCEPTANCE_FLOOR)
    slope_N = torch.where(alpha_N > ACCEPTANCE_FLOOR, floored_N.reciprocal(), 0.0)
    return -floored_N.log(), slope_N[:, None] * pair.tv_grad_ND


def lk_hybrid(pair: Pair) -> LossAndGradient:
    """λ·KL + (1 − λ)·TV with λ = exp(−3α) held constant: KL while the two disagree, TV once they overlap."""
    mix_N = torch.exp(-HYBRID_RATE * pair.acceptance_N)
    kl_N, kl_grad_ND = kl_div(pair)
    tv_N, tv_grad_ND = tv(pair)
    mix_N1 = mix_N[:, None]
    return torch.lerp(tv_N, kl_N, mix_N), torch.lerp(tv_grad_ND, kl_grad_ND, mix_N1)


LOSSES: Mapping[str, Callable[[Pair], LossAndGradient]] = {
    "kl_div": kl_div,
    "rkl": rkl,
    "jsd": jsd,
    "ce": ce,
    "tv": tv,
    "nla": nla,
    "lk_hybrid": lk_hybrid,
}
"""Every loss by the name that recipes use."""
