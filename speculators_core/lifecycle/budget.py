"""What work takes, in time, tokens, bytes and money, and what of it a recipe allows."""

from __future__ import annotations

from pydantic import Field

from speculators_core.types import StrictModel


class BudgetConfig(StrictModel):
    """What a recipe may take for one verifier, all attempts together; stages found in the store take nothing."""

    hours: float | None = Field(None, gt=0, description="hours of work")
    cost: float | None = Field(None, gt=0, description="price by lifecycle.price_per_hour")
    tokens: int | None = Field(None, ge=1, le=10**15, description="tokens prepared, captured, trained on and written")
    gigabytes: float | None = Field(None, gt=0, description="hidden states stored, in 1e9 bytes")


class Amount(StrictModel):
    """What work took or will take; what cannot be told counts as nothing."""

    seconds: float = 0.0
    tokens: int = 0
    num_bytes: int = Field(0, description="of hidden states")
    cost: float = Field(0.0, description="0 without a price")

    def __add__(self, other: Amount) -> Amount:
        return Amount(
            seconds=self.seconds + other.seconds,
            tokens=self.tokens + other.tokens,
            num_bytes=self.num_bytes + other.num_bytes,
            cost=self.cost + other.cost,
        )

    def less(self, other: Amount) -> Amount:
        """What is left of it, nothing below zero."""
        return Amount(
            seconds=max(0.0, self.seconds - other.seconds),
            tokens=max(0, self.tokens - other.tokens),
            num_bytes=max(0, self.num_bytes - other.num_bytes),
            cost=max(0.0, self.cost - other.cost),
        )


def excess(budget: BudgetConfig, amount: Amount) -> tuple[str, ...]:
    """What of a budget an amount exceeds, in words; empty where it fits."""
    lines: tuple[tuple[str, float, float | None, str], ...] = (
        ("hours", amount.seconds / 3600, budget.hours, ".3g"),
        ("cost", amount.cost, budget.cost, ".4g"),
        ("tokens", amount.tokens, budget.tokens, ",d"),
        ("gigabytes", amount.num_bytes / 1e9, budget.gigabytes, ".3g"),
    )
    return tuple(
        f"{name} {format(used, form)} of {format(allowed, form)}"
        for name, used, allowed, form in lines
        if allowed is not None and used > allowed
    )
