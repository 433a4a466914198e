"""How far a chain of drafts agrees with the verifier."""

from __future__ import annotations

import torch
from torch import Tensor

from speculators_core.types import Counted


def unrolled_metrics(correct_SR: Tensor, counted_SR: Tensor, started_SR: Tensor | None = None) -> dict[str, Counted]:
    """Acceptance of each unrolled step, and the acceptance length that it promises.

    Args:
        correct_SR: bool, the draft's argmax at step s of row r is the verifier's.
        counted_SR: bool, the row counts at that step.
        started_SR: the other convention of counting (speculators 0.9): `full_acc_k` also asks the row to have
            started inside a reply, and `cond_acc_k` is measured among started rows whatever counts later.

    Returns:
        `full_acc_k`: rows correct at all steps 0..k / rows counted at k ·
        `cond_acc_k`: the same / rows still correct after k − 1 ·
        `eal` (not in the other convention): 1 + length of the leading run of correct steps, over rows
        counted at step 0. It is what drafting at *every* position would accept; serving lands on harder ones.
    """
    steps = correct_SR.shape[0]
    unbroken_SR = torch.cumprod(correct_SR.int(), dim=0).bool()
    metrics: dict[str, Counted] = {}
    accepted = 0.0
    for step in range(steps):
        asked_R = counted_SR[step]
        eligible_R = asked_R if started_SR is None else started_SR[step]
        hits = float((unbroken_SR[step] & asked_R & eligible_R).sum())
        still_R = eligible_R if step == 0 else eligible_R & unbroken_SR[step - 1]
        metrics[f"full_acc_{step}"] = Counted(hits, float(asked_R.sum()))
        metrics[f"cond_acc_{step}"] = Counted(hits, float(still_R.sum()))
        accepted += hits
    if started_SR is None:
        chains = float(counted_SR[0].sum())
        metrics["eal"] = Counted(chains + accepted, chains)
    return metrics
