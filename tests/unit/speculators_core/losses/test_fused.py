from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from speculators_core.losses.closed_form import LOSSES, Distribution, Pair
from speculators_core.losses.fused import UnrolledTargets, unrolled_loss
from speculators_core.losses.terms import parse_loss

ROWS, TARGETS, HIDDEN, DRAFT = 11, 13, 8, 50
TERMS = parse_loss({"kl_div": 0.7, "tv": 0.3})


def problem(steps: int = 3) -> tuple[list[Tensor], Tensor, Tensor, UnrolledTargets]:
    generator = torch.Generator().manual_seed(1)
    hidden = [torch.randn(ROWS, HIDDEN, generator=generator, requires_grad=True) for _ in range(steps)]
    head = torch.randn(DRAFT, HIDDEN, generator=generator)
    logits = torch.randn(TARGETS, DRAFT, generator=generator) * 2
    rows = torch.stack([torch.randperm(TARGETS, generator=generator) for _ in range(steps)])
    rows = torch.where(rows < ROWS, rows, -1)
    weights = torch.rand(steps, TARGETS, generator=generator) * (rows >= 0)
    return hidden, head, logits, UnrolledTargets(rows, weights)


def naive(hidden: list[Tensor], head: Tensor, logits: Tensor, targets: UnrolledTargets, scale: float) -> Tensor:
    total = torch.zeros(())
    for step, states in enumerate(hidden):
        for target, row in enumerate(targets.rows_SU[step].tolist()):
            if row >= 0:
                z_q = scale * (states[row] @ head.T)[None]
                log_q, log_p = z_q.log_softmax(-1), logits[target][None].log_softmax(-1)
                kl = (log_p.exp() * (log_p - log_q)).sum()
                tv = 1 - torch.minimum(log_p.exp(), log_q.exp()).sum()
                total = total + targets.weights_SU[step, target] * (0.7 * kl + 0.3 * tv)
    return total


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_fused_is_the_plain_sum_of_losses_whatever_the_chunk(chunk: int, scale: float) -> None:
    hidden, head, logits, targets = problem()
    head.requires_grad_()
    outcome = unrolled_loss(hidden, head, lambda w: logits[w], targets, TERMS, logit_scale=scale, chunk=chunk)
    expected = naive(hidden, head, logits, targets, scale)
    torch.testing.assert_close(outcome.loss, expected)
    found = torch.autograd.grad(outcome.loss * 3.0, [*hidden, head])
    wanted = torch.autograd.grad(expected * 3.0, [*hidden, head])
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_without_gradients_the_numbers_are_the_same() -> None:
    hidden, head, logits, targets = problem()
    with_grad = unrolled_loss(hidden, head, lambda w: logits[w], targets, TERMS)
    with torch.no_grad():
        without = unrolled_loss(hidden, head, lambda w: logits[w], targets, TERMS, want_acceptance=True)
    assert torch.equal(with_grad.loss, without.loss)
    assert torch.equal(with_grad.correct_SU, without.correct_SU)
    assert without.acceptance_SU is not None
    pair = Pair(Distribution(hidden[0].detach()[targets.rows_SU[0].clamp_min(0)] @ head.T), Distribution(logits))
    present = targets.rows_SU[0] >= 0
    torch.testing.assert_close(without.acceptance_SU[0][present], pair.acceptance_N[present])
    assert torch.equal(without.correct_SU[0], present & (pair.draft.top_N == pair.verifier.top_N))


def test_autocast_does_not_reach_the_loss() -> None:
    hidden, head, logits, targets = problem()
    with torch.autocast("cpu", torch.bfloat16):
        rounded = unrolled_loss(hidden, head, lambda w: logits[w], targets, TERMS)
    states = [h.detach().bfloat16().float() for h in hidden]
    total = 0.0
    for step, h in enumerate(states):
        z_q = (h.bfloat16() @ head.bfloat16().T).float()[targets.rows_SU[step].clamp_min(0)]
        pair = Pair(Distribution(z_q), Distribution(logits))
        for term in TERMS:
            total += term.weight * float((LOSSES[term.name](pair)[0] * targets.weights_SU[step]).sum())
    assert float(rounded.loss.detach()) == pytest.approx(total, rel=1e-5)


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation made."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor):
                self.numel = max(self.numel, value.numel())
        return result


def test_no_tensor_spans_all_rows_and_the_vocabulary() -> None:
    rows, draft, chunk = 96, 512, 16
    hidden = [torch.randn(rows, HIDDEN, requires_grad=True) for _ in range(2)]
    head, last = torch.randn(draft, HIDDEN), torch.randn(rows, HIDDEN)
    targets = UnrolledTargets(torch.arange(rows).expand(2, -1), torch.ones(2, rows))
    with Largest() as largest:
        unrolled_loss(hidden, head, lambda w: last[w] @ head.T, targets, TERMS, chunk=chunk).loss.backward()  # type: ignore[no-untyped-call]
    assert largest.numel <= chunk * draft < rows * draft
