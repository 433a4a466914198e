"""What a draft must show before it may serve."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from speculators_core.types import StrictModel


class GateConfig(StrictModel):
    """One rule for every promotion; see `gate.decide`."""

    al_floor: float = Field(default=1.0, ge=1.0, description="Least acceptance length.")
    al_floor_low: float | None = Field(default=None, ge=1.0, description="Least lower end of its interval.")
    min_prompts: int = Field(default=100, ge=1, description="Fewer evaluated prompts decide nothing.")
    max_prompts: int = Field(default=1024, ge=1, description="Prompts to go up to while the outcome is inconclusive.")
    margin: float = Field(default=0.03, ge=0, lt=1, description="Tolerated relative loss of AL to the incumbent.")
    domain_min_prompts: int = Field(default=50, ge=2, description="Smaller domains are reported, not gated.")
    confidence: float = Field(default=0.95, gt=0.5, lt=1, description="Of each one-sided bound.")
    resamples: int = Field(default=10_000, ge=100, le=1_000_000, description="Bootstrap resamples.")
    seed: int = Field(default=0, ge=0, description="Of the bootstrap.")
    lossless: Literal["require", "report"] = Field(default="require", description="Whether lossy drafts fail.")
    speed: Literal["require", "report"] = Field(
        default="require", description="Whether drafts that do not pay fail (measured with alternating arms)."
    )
    min_speed_ratio: float = Field(default=1.0, gt=0, description="Least tokens/s with the draft over without.")
    approval: Literal["none", "required"] = Field(
        default="none", description="Whether a person must approve what the gate has passed."
    )
    approval_timeout_s: int = Field(
        default=86_400,
        ge=60,
        description="A run that waits longer for it ends, and promotes nothing.",
    )
