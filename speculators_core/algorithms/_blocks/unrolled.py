"""Where a packed row is drafted from, one token after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from speculators_core.algorithms._blocks.attention import AttentionPlan, plan_attention

GoOn = Callable[[int, Tensor], Tensor]
"""(step, its normalised states [R, H]) -> the tokens int64 [R] that the next step reads."""


@dataclass(frozen=True)
class Drafting:
    """Where a packed row is drafted from.

    rows_R int64, ascending: the rows that are unrolled · document_ids_T int64: −1 is padding.
    """

    rows_R: Tensor
    document_ids_T: Tensor
    plans: dict[tuple[bool, int | None, int], AttentionPlan] = field(default_factory=dict)

    def plan(self, every_row: bool, window: int | None, shift: int) -> AttentionPlan:
        """Which keys the drafting rows (or all rows) meet; made once for each window that cuts anything."""
        if window is None or window - shift >= self.document_ids_T.numel():
            window, shift = None, 0
        key = (every_row, window, shift)
        if key not in self.plans:
            rows_R = None if every_row else self.rows_R
            self.plans[key] = plan_attention(self.document_ids_T, rows_R, window, shift=shift)
        return self.plans[key]
