"""What one parallel pass computes: real rows, and masked rows at growing depths behind some of them.

An element is (anchor a, depth d). At depth 0 it is row a itself, with its token and features. At depth d ≥ 1 it is a
masked row at position a + d that sees the rows up to a and the masked rows 1..d of its own anchor, as vLLM's parallel
drafting lays them out. Element (a, d) is asked for what row a + d would be asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from speculators_core.algorithms._blocks.attention import AttentionPlan, plan_attention
from speculators_core.algorithms._blocks.chains import counted_links, rounded_up
from speculators_core.algorithms.peagle.config import PEagleConfig
from speculators_core.types import Batch


@dataclass(frozen=True)
class Elements:
    """The elements of one packed row whose states are wanted.

    anchors: for each depth from 0 int64, ascending; those of depth d ≥ 2 are among those of depth d − 1 ·
    counted: for each depth bool, whether the element is learned from · document_ids_T int64: −1 is padding.
    """

    anchors: tuple[Tensor, ...]
    counted: tuple[Tensor, ...]
    document_ids_T: Tensor
    plans: dict[tuple[int, int | None], AttentionPlan] = field(default_factory=dict)

    @property
    def num_masked(self) -> int:
        """M, elements at depth 1 and deeper."""
        return sum(anchors.numel() for anchors in self.anchors[1:])

    def plan(self, depth: int | None, window: int | None) -> AttentionPlan:
        """Which real rows the elements of a depth see; None: every real row asks. The window moves with the depth."""
        shift = depth or 0
        if window is not None and window - shift >= self.document_ids_T.numel():
            window = None
        key = (-1 if depth is None else depth, window)
        if key not in self.plans:
            rows = None if depth is None else self.anchors[depth]
            self.plans[key] = plan_attention(self.document_ids_T, rows, window, shift=shift)
        return self.plans[key]


def countable(config: PEagleConfig, batch: Batch) -> Tensor:
    """bool [D, T]: elements that may be learned from.

    Every token of the chain must have been written by the verifier in the row's document. With `compat` the chain is
    one token shorter (its last token is the one below which the element stands, not the one that it is asked for), and
    may run on into the next document.
    """
    mask = batch.loss_mask.bool()
    if not config.compat:
        return counted_links(mask, batch.document_ids, config.num_depths)
    chains = counted_links(mask, torch.zeros_like(batch.document_ids), max(config.num_depths - 1, 1))
    return torch.cat([mask[None], chains])[: config.num_depths]


def sizes(config: PEagleConfig, countable_DT: Tensor) -> list[int]:
    """How many elements of each depth are learned from: all at depth 0, a falling share of the chains behind it."""
    numbers = countable_DT.sum(dim=1).tolist()
    limit = config.max_anchors
    wanted = [numbers[0]]
    for depth, number in enumerate(numbers[1:], start=1):
        share = max(config.down_sample_ratio**depth, config.down_sample_ratio_min)
        wanted.append(int((number if limit is None else min(number, limit)) * share))
    return wanted


def draw_elements(config: PEagleConfig, batch: Batch) -> Elements:
    """A random choice of `sizes` elements, from torch's own generator ("COD sampling", arXiv 2602.01469).

    It goes from the deepest to the first: each depth keeps the anchors below it and draws the rest. So chains have no
    holes, and the numbers of elements do not depend on the draw.
    """
    countable_DT = countable(config, batch)
    wanted = sizes(config, countable_DT)
    chosen = batch.input_ids.new_zeros(0)
    anchors = []
    for depth in range(config.num_depths - 1, 0, -1):
        free_T = countable_DT[depth].clone()
        free_T[chosen] = False
        pool = free_T.nonzero().squeeze(1)
        more = torch.randperm(pool.numel(), device=pool.device)[: wanted[depth] - chosen.numel()]
        chosen = torch.cat([chosen, pool[more]]).sort().values
        anchors.append(chosen)
    rows_R = rounded_up(countable_DT[0], batch.document_ids)
    by_depth = (rows_R, *reversed(anchors))
    counted = (countable_DT[0][rows_R], *(torch.ones_like(rows, dtype=torch.bool) for rows in by_depth[1:]))
    return Elements(by_depth, counted, batch.document_ids)


def every_depth(rows_R: Tensor, document_ids_T: Tensor, depths: int) -> Elements:
    """All depths of these rows: what serving computes there."""
    ones = torch.ones_like(rows_R, dtype=torch.bool)
    return Elements((rows_R,) * depths, (ones,) * depths, document_ids_T)
