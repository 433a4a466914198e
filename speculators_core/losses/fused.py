"""Vocabulary projection and loss in one step, chunk by chunk, for drafts that are unrolled several times.

The verifier's distribution at a position is the target of several draft rows: step 0 of the row there, step 1 of the
row before, and so on. So the loop runs over *target* positions: a chunk of verifier logits is formed once, every
unrolled step is compared with it, and the gradient with respect to the draft's hidden states is formed at once from
the closed forms. At no time do more than two or three [chunk, D] tensors exist.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from speculators_core.losses.closed_form import LOSSES, Distribution, Pair, Slope
from speculators_core.losses.terms import LossTerm

DEFAULT_CHUNK = 128
"""Target rows at a time. [128, 8192] float32 is 4 MB: large enough for matrix units, small enough for caches."""
SPARSE = 0.5
"""Share of rows that are there below which they are gathered; above, computing all of them costs less."""

Weigh = Callable[[Tensor], Tensor]
"""Losses float32 [S, U] to the weights [S, U] that multiply them; the weights are held constant."""


@dataclass(frozen=True)
class UnrolledTargets:
    """Which draft row meets which target, and with what weight.

    rows_SU int64: for step s and target u the row of that step's hidden states, −1 where there is none ·
    weights_SU float32: what multiplies the row's loss (mask × decay ÷ denominator), 0 where it does not count ·
    hard_U int64: draft ids that `ce` wants in place of the verifier's best tokens.
    """

    rows_SU: Tensor
    weights_SU: Tensor
    hard_U: Tensor | None = None


@dataclass(frozen=True)
class UnrolledLoss:
    """Outcome of `unrolled_loss`; only `loss` carries a gradient.

    loss: Σ over terms and steps, float32 scalar · term_sums_SN float64: per step and term, Σ weights·ℓ without the
    term's own weight · correct_SU bool: the draft's argmax equals the verifier's · acceptance_SU float32:
    Σ min(p, q), or None when it was not asked for · candidates: likewise.
    """

    loss: Tensor
    term_sums_SN: Tensor
    correct_SU: Tensor
    acceptance_SU: Tensor | None
    candidates: Candidates | None = None


@dataclass(frozen=True)
class Candidates:
    """The draft's K best tokens beside the verifier's choice.

    best_SUK int64, best first · mass_SUK float32: the verifier's probability of each · target_U int64: the verifier's
    best token · target_mass_U float32: its probability.
    """

    best_SUK: Tensor
    mass_SUK: Tensor
    target_U: Tensor
    target_mass_U: Tensor


def unrolled_loss(
    hidden_SRH: Sequence[Tensor],
    head_DH: Tensor,
    target_logits: Callable[[slice], Tensor],
    targets: UnrolledTargets,
    terms: Sequence[LossTerm],
    *,
    tail_DC: Tensor | None = None,
    weigh: Weigh | None = None,
    variants: int = 1,
    logit_scale: float = 1.0,
    chunk: int = DEFAULT_CHUNK,
    want_acceptance: bool = False,
    want_candidates: int | None = None,
) -> UnrolledLoss:
    """Σ_s Σ_u weights[s, u] · ℓ(head · hidden[s][rows[s, u]], target_logits[u]).

    Args:
        hidden_SRH: for each step the draft's normalised hidden states [R, H], or [R, H + C] with a tail.
        head_DH: the draft's vocabulary head; gets a gradient only if it asks for one.
        tail_DC: trained columns beside the head: a low-rank bias of the logits costs no second pass over D.
        weigh: weights that depend on the losses themselves, in place of those of `targets`.
        variants: readings of the same states: steps are variants × links, and those of one link differ in their last C
            columns only, so that they share the product with the head.
        target_logits: gives the verifier's logits float32 [u, D] of a slice of targets; never differentiated.
        targets: rows and weights.
        terms: the weighted sum of losses.
        logit_scale: factor on the draft's logits.
        chunk: targets at a time.
        want_acceptance: also return Σ min(p, q) of each row.
        want_candidates: also return that many best tokens of each row.
    """
    device = hidden_SRH[0].device.type
    compute = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_SRH[0].dtype
    candidates = _no_candidates(targets.rows_SU, want_candidates)
    assert variants == 1 or (tail_DC is not None and not head_DH.requires_grad)
    plan = _Plan(
        target_logits,
        targets,
        tuple(terms),
        weigh,
        variants,
        logit_scale,
        chunk,
        want_acceptance,
        candidates,
        compute,
        shared_columns=head_DH.shape[1] if variants > 1 else 0,
    )
    sources = (head_DH, *hidden_SRH, *(() if tail_DC is None else (tail_DC,)))
    needs_grad = torch.is_grad_enabled() and any(source.requires_grad for source in sources)
    with torch.autocast(device, enabled=False):  # it would form even float32 dot products in bfloat16
        if not needs_grad:
            return UnrolledLoss(*_run(plan, hidden_SRH, head_DH, tail_DC, None, None), candidates)
        loss, sums_SN, correct_SU, acceptance_SU = _UnrolledLoss.apply(  # type: ignore[no-untyped-call]
            plan, head_DH, tail_DC, *hidden_SRH
        )
    return UnrolledLoss(loss, sums_SN, correct_SU, acceptance_SU if want_acceptance else None, candidates)


def _no_candidates(rows_SU: Tensor, wanted: int | None) -> Candidates | None:
    """Room for them: they are written while the loss is formed, and no gradient passes through them."""
    if wanted is None:
        return None
    steps, count, device = *rows_SU.shape, rows_SU.device
    return Candidates(
        best_SUK=torch.zeros(steps, count, wanted, dtype=torch.int64, device=device),
        mass_SUK=torch.zeros(steps, count, wanted, device=device),
        target_U=torch.zeros(count, dtype=torch.int64, device=device),
        target_mass_U=torch.zeros(count, device=device),
    )


@dataclass(frozen=True)
class _Plan:
    target_logits: Callable[[slice], Tensor]
    targets: UnrolledTargets
    terms: tuple[LossTerm, ...]
    weigh: Weigh | None
    variants: int
    logit_scale: float
    chunk: int
    want_acceptance: bool
    candidates: Candidates | None
    compute: torch.dtype
    shared_columns: int = 0


def _run(
    plan: _Plan,
    hidden_SRH: Sequence[Tensor],
    head_DH: Tensor,
    tail_DC: Tensor | None,
    grads_SRH: Sequence[Tensor] | None,
    columns_grad: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The loop over chunks; fills the gradients that it is given.

    `columns_grad` [D, C'] is that of the last C' columns of head and tail side by side: of all, or of the tail.
    """
    head = head_DH.detach() if tail_DC is None else torch.cat((head_DH.detach(), tail_DC.detach().to(head_DH)), dim=1)
    head = head.to(plan.compute)
    if plan.weigh is not None and columns_grad is not None:
        # the columns' gradient mixes rows, so their weights are needed before it is formed
        losses_SU = _losses(plan, hidden_SRH, head, None, None, plan.targets.weights_SU)[0] @ _term_weights(plan)
        plan = replace(plan, targets=replace(plan.targets, weights_SU=plan.weigh(losses_SU)), weigh=None)
    weights_SU = plan.targets.weights_SU
    unweighted = plan.weigh is not None
    used_SU = torch.ones_like(weights_SU) if unweighted else weights_SU
    losses_SUN, correct_SU, acceptance_SU = _losses(plan, hidden_SRH, head, grads_SRH, columns_grad, used_SU)
    if plan.weigh is not None:
        weights_SU = plan.weigh(losses_SUN @ _term_weights(plan))
        for step, grads in enumerate(grads_SRH or ()):  # each row is met once a step: its gradient scales with it
            rows_U = plan.targets.rows_SU[step]
            scale_R = torch.zeros(grads.shape[0], dtype=grads.dtype, device=grads.device)
            scale_R.index_add_(0, rows_U.clamp_min(0), torch.where(rows_U >= 0, weights_SU[step], 0.0).to(grads.dtype))
            grads *= scale_R[:, None]
    sums_SN = torch.einsum("sun,su->sn", losses_SUN.double(), weights_SU.double())
    loss = (sums_SN @ _term_weights(plan).to(sums_SN)).sum().float()
    return loss, sums_SN, correct_SU, acceptance_SU


def _term_weights(plan: _Plan) -> Tensor:
    weights = [term.weight for term in plan.terms]
    return torch.tensor(weights, dtype=torch.float32, device=plan.targets.weights_SU.device)


def _losses(
    plan: _Plan,
    hidden_SRH: Sequence[Tensor],
    head: Tensor,
    grads_SRH: Sequence[Tensor] | None,
    columns_grad: Tensor | None,
    weights_SU: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Losses float32 [S, U, N], zero where there is no row, whether the best tokens agree, and Σ min(p, q)."""
    rows_SU = plan.targets.rows_SU
    steps, count = rows_SU.shape
    links = steps // plan.variants
    shared = plan.shared_columns
    losses_SUN = torch.zeros(steps, count, len(plan.terms), device=rows_SU.device)
    correct_SU = torch.zeros(steps, count, dtype=torch.bool, device=rows_SU.device)
    acceptance_SU = torch.zeros_like(weights_SU) if plan.want_acceptance else None
    columns = None if columns_grad is None else _ColumnsGradient(columns_grad, plan.chunk, plan.compute)
    for start in range(0, count, plan.chunk):
        window = slice(start, min(start + plan.chunk, count))
        verifier = Distribution(plan.target_logits(window))
        if plan.candidates is not None:
            plan.candidates.target_U[window] = verifier.top_N
            plan.candidates.target_mass_U[window] = verifier.probs_ND.amax(dim=-1).float()
        for link in range(links):
            targets_u, pair_verifier = torch.arange(window.start, window.stop, device=rows_SU.device), verifier
            present_u = rows_SU[link, window] >= 0
            if int(present_u.sum()) < SPARSE * present_u.numel():
                targets_u = targets_u[present_u]
                if targets_u.numel() == 0:
                    continue
                pair_verifier = Distribution(verifier.logits_ND[present_u])
                present_u = present_u[present_u]
            safe_u = rows_SU[link, targets_u].clamp_min(0)  # absent rows compute with row 0 and weigh nothing
            hard_u = None if plan.targets.hard_U is None else plan.targets.hard_U[targets_u]
            base_uD = shared_grad_uD = None
            if shared:
                base_uD = hidden_SRH[link].detach()[safe_u, :shared].to(plan.compute) @ head[:, :shared].T
                base_uD = base_uD.to(verifier.logits_ND.dtype)
            for step in range(link, steps, links):
                weights_u = weights_SU[step, targets_u].to(verifier.logits_ND.dtype) * present_u
                own_uC = hidden_SRH[step].detach()[safe_u, shared:].to(plan.compute)
                logits_uD = (own_uC @ head[:, shared:].T).to(verifier.logits_ND.dtype)
                if base_uD is not None:
                    logits_uD += base_uD
                if plan.logit_scale != 1.0:
                    logits_uD *= plan.logit_scale
                pair = Pair(Distribution(logits_uD), pair_verifier, hard_u)
                correct_SU[step, targets_u] = pair.draft.agrees_N(pair_verifier) & present_u
                if plan.candidates is not None:
                    wanted = plan.candidates.best_SUK.shape[-1]
                    best_uK = torch.topk(logits_uD, wanted).indices if wanted > 1 else pair.draft.top_N[:, None]
                    plan.candidates.best_SUK[step, targets_u] = best_uK
                    plan.candidates.mass_SUK[step, targets_u] = pair_verifier.probs_ND.gather(1, best_uK).float()
                slope = Slope()
                for number, term in enumerate(plan.terms):
                    loss_u, term_slope = LOSSES[term.name](pair)
                    losses_SUN[step, targets_u, number] = loss_u.float() * present_u
                    slope = slope.plus(term_slope.times(term.weight))
                if acceptance_SU is not None:
                    acceptance_SU[step, targets_u] = (1.0 - pair.rejection_N).float() * present_u
                if grads_SRH is None:
                    continue
                grad_uD = slope.times(weights_u * plan.logit_scale).formed(pair)
                if shared:
                    shared_grad_uD = grad_uD if shared_grad_uD is None else shared_grad_uD.add_(grad_uD)
                grad_uD = grad_uD.to(plan.compute) if columns is None else columns.add(grad_uD, own_uC)
                # rows of a step are distinct apart from the weightless stand-ins, so adding is exact
                grad_uC = grad_uD @ head[:, shared:]
                grads_SRH[step][:, shared:].index_add_(0, safe_u, grad_uC.to(grads_SRH[step].dtype))
            if grads_SRH is not None and shared_grad_uD is not None:
                grad_uH = shared_grad_uD.to(plan.compute) @ head[:, :shared]
                grads_SRH[link][:, :shared].index_add_(0, safe_u, grad_uH.to(grads_SRH[link].dtype))
    if columns is not None:
        columns.settle()
    return losses_SUN, correct_SU, acceptance_SU


class _ColumnsGradient:
    """The gradient of trained columns [D, C], formed for a few pairs at a time: adding it up costs as much as forming.

    Args:
        grad_DC: what is added to, by `settle` at the latest.
        chunk: largest number of rows of a pair.
        compute: dtype that gradients of logits are rounded to, as autocast does.
    """

    PAIRS = 4

    def __init__(self, grad_DC: Tensor, chunk: int, compute: torch.dtype) -> None:
        self._grad_DC = grad_DC
        self._grads_ND = grad_DC.new_empty(self.PAIRS * chunk, grad_DC.shape[0], dtype=compute)
        self._states: list[Tensor] = []
        self._filled = 0

    def add(self, grad_uD: Tensor, states_uC: Tensor) -> Tensor:
        """Take the gradient of logits, and the states whose last C columns they are products of.

        Returns:
            The gradient, rounded; good until the next call.
        """
        if self._filled + grad_uD.shape[0] > self._grads_ND.shape[0]:
            self.settle()
        rounded_uD = self._grads_ND[self._filled : self._filled + grad_uD.shape[0]].copy_(grad_uD)
        self._filled += grad_uD.shape[0]
        self._states.append(states_uC[:, -self._grad_DC.shape[1] :])
        return rounded_uD

    def settle(self) -> None:
        """Add what is pending."""
        if self._states:
            self._grad_DC.add_(self._grads_ND[: self._filled].T @ torch.cat(self._states))
            self._states.clear()
            self._filled = 0


class _UnrolledLoss(torch.autograd.Function):
    """Forms the gradients during the forward pass; backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any, plan: _Plan, head_DH: Tensor, tail_DC: Tensor | None, *hidden_SRH: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        grads = [torch.zeros_like(hidden) for hidden in hidden_SRH]
        tail_width = tail_DC.shape[1] if tail_DC is not None and tail_DC.requires_grad else 0
        width = hidden_SRH[0].shape[1] if head_DH.requires_grad else tail_width
        columns = torch.zeros(head_DH.shape[0], width, device=head_DH.device) if width else None
        loss, sums_SN, correct_SU, acceptance_SU = _run(plan, hidden_SRH, head_DH, tail_DC, grads, columns)
        ctx.save_for_backward(*grads, *(() if columns is None else (columns,)))
        ctx.steps, ctx.tail_width, ctx.head_trained = len(grads), tail_width, head_DH.requires_grad
        ctx.dtypes = head_DH.dtype, None if tail_DC is None else tail_DC.dtype
        ctx.mark_non_differentiable(sums_SN, correct_SU, *(() if acceptance_SU is None else (acceptance_SU,)))
        return loss, sums_SN, correct_SU, acceptance_SU

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        grads = [grad * upstream[0].to(grad.dtype) for grad in saved[: ctx.steps]]
        head_grad = tail_grad = None
        if len(saved) > ctx.steps:
            columns = saved[ctx.steps] * upstream[0]
            if ctx.tail_width:
                tail_grad = columns[:, -ctx.tail_width :].to(ctx.dtypes[1])
            if ctx.head_trained:
                head_grad = columns[:, : columns.shape[1] - ctx.tail_width].to(ctx.dtypes[0])
        return (None, head_grad, tail_grad, *grads)
