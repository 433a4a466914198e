"""Vocabulary projection and loss in one step, chunk by chunk, for drafts that are unrolled several times.

The verifier's distribution at a position is the target of several draft rows: step 0 of the row there, step 1 of the
row before, and so on. So the loop runs over *target* positions: a chunk of verifier logits is formed once, every
unrolled step is compared with it, and the gradient with respect to the draft's hidden states is formed at once from
the closed forms. At no time do more than two or three [chunk, D] tensors exist.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from speculators_core.losses.closed_form import LOSSES, Distribution, Pair
from speculators_core.losses.terms import LossTerm

DEFAULT_CHUNK = 128
"""Target rows at a time. [128, 8192] float32 is 4 MB: large enough for matrix units, small enough for caches."""


@dataclass(frozen=True)
class UnrolledTargets:
    """Which draft row meets which target, and with what weight.

    rows_SU int64: for step s and target u the row of that step's hidden states, −1 where there is none ·
    weights_SU float32: what multiplies the row's loss (mask × decay ÷ denominator), 0 where it does not count.
    """

    rows_SU: Tensor
    weights_SU: Tensor


@dataclass(frozen=True)
class UnrolledLoss:
    """Outcome of `unrolled_loss`; only `loss` carries a gradient.

    loss: Σ over terms and steps, float32 scalar · term_sums_SN float64: per step and term, Σ weights·ℓ without the
    term's own weight · correct_SU bool: the draft's argmax equals the verifier's · acceptance_SU float32:
    Σ min(p, q), or None when it was not asked for.
    """

    loss: Tensor
    term_sums_SN: Tensor
    correct_SU: Tensor
    acceptance_SU: Tensor | None


def unrolled_loss(
    hidden_SRH: Sequence[Tensor],
    head_DH: Tensor,
    target_logits: Callable[[slice], Tensor],
    targets: UnrolledTargets,
    terms: Sequence[LossTerm],
    *,
    logit_scale: float = 1.0,
    chunk: int = DEFAULT_CHUNK,
    want_acceptance: bool = False,
) -> UnrolledLoss:
    """Σ_s Σ_u weights[s, u] · ℓ(head · hidden[s][rows[s, u]], target_logits[u]).

    Args:
        hidden_SRH: for each step the draft's normalised hidden states [R, H].
        head_DH: the draft's vocabulary head; gets a gradient only if it asks for one.
        target_logits: gives the verifier's logits float32 [u, D] of a slice of targets; never differentiated.
        targets: rows and weights.
        terms: the weighted sum of losses.
        logit_scale: factor on the draft's logits.
        chunk: targets at a time.
        want_acceptance: also return Σ min(p, q) of each row.
    """
    device = hidden_SRH[0].device.type
    compute = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_SRH[0].dtype
    plan = _Plan(target_logits, targets, tuple(terms), logit_scale, chunk, want_acceptance, compute)
    needs_grad = torch.is_grad_enabled() and (head_DH.requires_grad or any(h.requires_grad for h in hidden_SRH))
    with torch.autocast(device, enabled=False):  # it would form even float32 dot products in bfloat16
        if not needs_grad:
            return UnrolledLoss(*_run(plan, hidden_SRH, head_DH, None, None))
        loss, sums_SN, correct_SU, acceptance_SU = _UnrolledLoss.apply(  # type: ignore[no-untyped-call]
            plan, head_DH, *hidden_SRH
        )
    return UnrolledLoss(loss, sums_SN, correct_SU, acceptance_SU if want_acceptance else None)


@dataclass(frozen=True)
class _Plan:
    target_logits: Callable[[slice], Tensor]
    targets: UnrolledTargets
    terms: tuple[LossTerm, ...]
    logit_scale: float
    chunk: int
    want_acceptance: bool
    compute: torch.dtype


def _run(
    plan: _Plan,
    hidden_SRH: Sequence[Tensor],
    head_DH: Tensor,
    grads_SRH: Sequence[Tensor] | None,
    head_grad_DH: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    rows_SU, weights_SU = plan.targets.rows_SU, plan.targets.weights_SU
    steps, count = rows_SU.shape
    head_DH = head_DH.detach().to(plan.compute)
    sums_SN = torch.zeros(steps, len(plan.terms), dtype=torch.float64, device=rows_SU.device)
    correct_SU = torch.zeros(steps, count, dtype=torch.bool, device=rows_SU.device)
    acceptance_SU = torch.zeros_like(weights_SU) if plan.want_acceptance else None
    for start in range(0, count, plan.chunk):
        window = slice(start, min(start + plan.chunk, count))
        verifier = Distribution(plan.target_logits(window))
        for step in range(steps):
            rows_u = rows_SU[step, window]
            present_u = rows_u >= 0
            weights_u = weights_SU[step, window].to(verifier.logits_ND.dtype)
            safe_u = rows_u.clamp_min(0)  # absent rows compute with row 0 and weigh nothing: cheaper than a gather of D
            hidden_uH = hidden_SRH[step].detach()[safe_u].to(plan.compute)
            logits_uD = (hidden_uH @ head_DH.T).to(verifier.logits_ND.dtype)
            if plan.logit_scale != 1.0:
                logits_uD *= plan.logit_scale
            pair = Pair(Distribution(logits_uD), verifier)
            correct_SU[step, window] = pair.draft.agrees_N(verifier) & present_u
            if acceptance_SU is not None:
                acceptance_SU[step, window] = pair.acceptance_N.float() * present_u
            grad_uD: Tensor | None = None
            for number, term in enumerate(plan.terms):
                loss_u, term_grad_uD = LOSSES[term.name](pair)
                sums_SN[step, number] += torch.dot(loss_u, weights_u)
                if grads_SRH is None:
                    continue
                if grad_uD is None:
                    grad_uD = term_grad_uD if term.weight == 1.0 else term_grad_uD * term.weight
                else:
                    grad_uD = grad_uD.add(term_grad_uD, alpha=term.weight)
            if grads_SRH is not None:
                assert grad_uD is not None
                scale_u1 = (weights_u * plan.logit_scale)[:, None]  # on [u, H], where it costs nothing
                grad_uD = grad_uD.to(plan.compute)
                # rows of a step are distinct apart from the weightless stand-ins, so adding is exact
                grad_uH = (grad_uD @ head_DH).to(scale_u1.dtype) * scale_u1
                grads_SRH[step].index_add_(0, safe_u, grad_uH.to(grads_SRH[step].dtype))
                if head_grad_DH is not None:
                    weighted_uH = hidden_uH.to(head_grad_DH.dtype) * scale_u1.to(head_grad_DH.dtype)
                    head_grad_DH.addmm_(grad_uD.T.to(head_grad_DH.dtype), weighted_uH)
    weights_N = sums_SN.new_tensor([term.weight for term in plan.terms])
    return (sums_SN @ weights_N).sum().float(), sums_SN, correct_SU, acceptance_SU


class _UnrolledLoss(torch.autograd.Function):
    """Forms the gradients during the forward pass; backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any, plan: _Plan, head_DH: Tensor, *hidden_SRH: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        grads = [torch.zeros_like(hidden) for hidden in hidden_SRH]
        head_grad = torch.zeros_like(head_DH, dtype=torch.float32) if head_DH.requires_grad else None
        loss, sums_SN, correct_SU, acceptance_SU = _run(plan, hidden_SRH, head_DH, grads, head_grad)
        ctx.save_for_backward(*grads, *(() if head_grad is None else (head_grad,)))
        ctx.steps, ctx.head_dtype = len(grads), head_DH.dtype
        ctx.mark_non_differentiable(sums_SN, correct_SU, *(() if acceptance_SU is None else (acceptance_SU,)))
        return loss, sums_SN, correct_SU, acceptance_SU

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        grads = [grad * upstream[0].to(grad.dtype) for grad in saved[: ctx.steps]]
        head_grad = (saved[ctx.steps] * upstream[0]).to(ctx.head_dtype) if len(saved) > ctx.steps else None
        return (None, head_grad, *grads)
