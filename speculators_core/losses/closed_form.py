"""Distances between the draft's and the verifier's next-token distributions, with their gradients in closed form.

Notation: z_q, z_p logits of draft and verifier, q, p their softmax, α = Σ min(p, q) the chance that speculative
sampling accepts. Every function returns the loss of each row and its gradient with respect to z_q, as a `Slope`; the
verifier's side is never differentiated. All inputs and outputs are float32 (or float64), whatever the model computes
in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from speculators_core.losses.best import best_index

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
        return best_index(self.logits_ND)

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
        agrees_N[rows] = best_index(self.logits_ND[rows]) == other.top_N[rows]  # ties: the first one counts
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
    def surplus_ND(self) -> Tensor:
        """q − p."""
        return self.draft.probs_ND - self.verifier.probs_ND

    @cached_property
    def above_ND(self) -> Tensor:
        """q where q > p, else 0: the part of the draft that acceptance falls with."""
        # a comparison and a `where` take ten times as long on a CPU
        found_ND: Tensor = torch.ops.aten.threshold_backward(self.draft.probs_ND, self.surplus_ND, 0.0)
        return found_ND

    @cached_property
    def acceptance_N(self) -> Tensor:
        """α = Σ min(p, q), the acceptance rate of speculative sampling (arXiv 2211.17192)."""
        return torch.minimum(self.draft.probs_ND, self.verifier.probs_ND).sum(dim=-1)

    @cached_property
    def rejection_N(self) -> Tensor:
        """1 − α = Σ max(q − p, 0)."""
        return self.surplus_ND.relu().sum(dim=-1)

    @property
    def rejection_slope(self) -> Slope:
        """d(1 − α)/dz_q = q·(1[q > p] − Σ_{q > p} q)."""
        return Slope(on_draft=-self.above_ND.sum(dim=-1), on_above=1.0)

    @cached_property
    def kl_N(self) -> Tensor:
        """KL(p ‖ q)."""
        p = self.verifier
        mean_N: Tensor = torch.linalg.vecdot(p.probs_ND, self.draft.logits_ND)
        return p.negentropy_N - mean_N + self.draft.lse_N


Factor = Tensor | float
"""A number for each row [N], or the same for all."""


@dataclass(frozen=True)
class Slope:
    """A gradient with respect to z_q as a sum of a few tensors, each times a factor.

    on_draft · q + on_verifier · p + on_above · (q where q > p) + on_hard at `Pair.hard_N` + dense [N, D]. So a weighted
    sum of losses is a sum of factors, and is formed in as few passes over [N, D] as one of them.
    """

    on_draft: Factor = 0.0
    on_verifier: Factor = 0.0
    on_above: Factor = 0.0
    on_hard: Factor = 0.0
    dense_ND: Tensor | None = None

    def times(self, factor: Factor) -> Slope:
        """The gradient of a loss times a factor that is held constant."""
        return Slope(
            self.on_draft * factor,
            self.on_verifier * factor,
            self.on_above * factor,
            self.on_hard * factor,
            None if self.dense_ND is None else self.dense_ND * _column(factor),
        )

    def plus(self, other: Slope) -> Slope:
        """The gradient of a sum."""
        both = [dense for dense in (self.dense_ND, other.dense_ND) if dense is not None]
        return Slope(
            self.on_draft + other.on_draft,
            self.on_verifier + other.on_verifier,
            self.on_above + other.on_above,
            self.on_hard + other.on_hard,
            torch.add(*both) if len(both) == 2 else next(iter(both), None),
        )

    def formed(self, pair: Pair) -> Tensor:
        """[N, D], a tensor of its own."""
        grad_ND = pair.draft.probs_ND * _column(self.on_draft)
        if _is_there(self.on_verifier):
            grad_ND.addcmul_(pair.verifier.probs_ND, _tensor(self.on_verifier, grad_ND))
        if _is_there(self.on_above):
            grad_ND.addcmul_(pair.above_ND, _tensor(self.on_above, grad_ND))
        if _is_there(self.on_hard):
            hard_N1 = pair.hard_N[:, None]
            grad_ND.scatter_add_(1, hard_N1, _tensor(self.on_hard, grad_ND).expand_as(hard_N1))
        return grad_ND if self.dense_ND is None else grad_ND.add_(self.dense_ND)


def _is_there(factor: Factor) -> bool:
    return isinstance(factor, Tensor) or factor != 0.0


def _column(factor: Factor) -> Factor:
    return factor[:, None] if isinstance(factor, Tensor) else factor


def _tensor(factor: Factor, like: Tensor) -> Tensor:
    return factor[:, None] if isinstance(factor, Tensor) else like.new_full((1, 1), factor)


LossAndSlope = tuple[Tensor, Slope]


def kl_div(pair: Pair) -> LossAndSlope:
    """Σ p ln(p/q); gradient q − p."""
    return pair.kl_N, Slope(on_draft=1.0, on_verifier=-1.0)


def rkl(pair: Pair) -> LossAndSlope:
    """Σ q ln(q/p); gradient q(ln(q/p) − loss)."""
    ratio_ND = pair.draft.log_probs_ND - pair.verifier.log_probs_ND
    loss_N = torch.linalg.vecdot(pair.draft.probs_ND, ratio_ND)
    return loss_N, Slope(dense_ND=pair.draft.probs_ND * (ratio_ND - loss_N[:, None]))


def jsd(pair: Pair) -> LossAndSlope:
    """½KL(p ‖ m) + ½KL(q ‖ m) with m = (p + q)/2; gradient ½q(ln(q/m) − KL(q ‖ m))."""
    p, q = pair.verifier, pair.draft
    log_m_ND = torch.logaddexp(p.log_probs_ND, q.log_probs_ND) - math.log(2.0)
    to_m_ND = q.log_probs_ND - log_m_ND
    q_to_m_N = torch.linalg.vecdot(q.probs_ND, to_m_ND)
    p_to_m_N = torch.linalg.vecdot(p.probs_ND, p.log_probs_ND - log_m_ND)
    return 0.5 * (p_to_m_N + q_to_m_N), Slope(dense_ND=0.5 * q.probs_ND * (to_m_ND - q_to_m_N[:, None]))


def ce(pair: Pair) -> LossAndSlope:
    """−ln q of the verifier's favourite token, or of the one given; gradient q − onehot."""
    loss_N = pair.draft.lse_N - pair.draft.logits_ND.gather(1, pair.hard_N[:, None]).squeeze(1)
    return loss_N, Slope(on_draft=1.0, on_hard=-1.0)


def tv(pair: Pair) -> LossAndSlope:
    """1 − α, the chance of a rejection."""
    return pair.rejection_N, pair.rejection_slope


def nla(pair: Pair) -> LossAndSlope:
    """−ln max(α, 1e-5); gradient of the total variation divided by α, zero below the floor."""
    alpha_N = pair.acceptance_N
    floored_N = alpha_N.clamp_min(ACCEPTANCE_FLOOR)
    slope_N = torch.where(alpha_N > ACCEPTANCE_FLOOR, floored_N.reciprocal(), 0.0)
    return -floored_N.log(), pair.rejection_slope.times(slope_N)


def lk_hybrid(pair: Pair) -> LossAndSlope:
    """λ·KL + (1 − λ)·TV with λ = exp(−3α) held constant: KL while the two disagree, TV once they overlap."""
    mix_N = torch.exp(-HYBRID_RATE * pair.acceptance_N)
    (kl_N, kl_slope), (tv_N, tv_slope) = kl_div(pair), tv(pair)
    return torch.lerp(tv_N, kl_N, mix_N), kl_slope.times(mix_N).plus(tv_slope.times(1.0 - mix_N))


LOSSES: Mapping[str, Callable[[Pair], LossAndSlope]] = {
    "kl_div": kl_div,
    "rkl": rkl,
    "jsd": jsd,
    "ce": ce,
    "tv": tv,
    "nla": nla,
    "lk_hybrid": lk_hybrid,
}
"""Every loss by the name that recipes use."""
