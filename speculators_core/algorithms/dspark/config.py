"""Every knob of DSpark, typed and strict."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from speculators_core.algorithms._blocks.block_knobs import BlockKnobs, check_blocks
from speculators_core.errors import ConfigError
from speculators_core.types import DraftPlan


class DSparkConfig(BlockKnobs):
    """Blocks filled in at once, corrected from left to right by the token before, with a stated confidence."""

    kind: Literal["dspark"] = Field(default="dspark", description="name of the algorithm")
    block_size: int = Field(default=8, ge=2, le=128, description="B: the last known token and B - 1 masks behind it")
    sample_from_anchor: bool = Field(
        default=True, description="slot k is asked for the token after it, so that the anchor drafts too"
    )
    markov_rank: int = Field(
        default=256, ge=0, le=2**16, description="rank of the correction by the token before; 0: none"
    )
    markov_head_type: Literal["vanilla", "gated", "rnn"] = Field(
        default="vanilla", description="what the correction depends on beside that token; vLLM serves vanilla alone"
    )
    enable_confidence_head: bool = Field(default=True, description="learn how likely each token is accepted")
    confidence_head_with_markov: bool = Field(default=True, description="the confidence knows the token before")
    confidence_head_alpha: float = Field(default=1.0, ge=0, description="weight of the confidence's loss")

    @model_validator(mode="after")
    def _heads_are_consistent(self) -> DSparkConfig:
        if self.sliding_window is None and self.sliding_window_non_causal:
            raise ValueError("sliding_window_non_causal is true, but no layer slides: leave it out")
        if self.markov_rank == 0 and self.enable_confidence_head and self.confidence_head_with_markov:
            raise ValueError("confidence_head_with_markov needs a markov_rank above 0: set it to false")
        return self


def check(config: DSparkConfig, plan: DraftPlan) -> None:
    """ConfigError where the recipe's rows or tokens do not suit the blocks, or vLLM has no such head."""
    check_blocks(config, plan)
    reason = unservable(config)
    if reason is not None and not plan.allow_unservable:
        raise ConfigError(
            f"algorithm.{reason}",
            mend="use markov_head_type vanilla with a rank, or set export.allow_unservable to train it all the same",
        )


def unservable(config: DSparkConfig) -> str | None:
    """Why vLLM 0.32 could not load the draft; None where it can."""
    if config.markov_rank == 0:
        return "markov_rank is 0, but vLLM always loads a Markov head"
    if config.markov_head_type != "vanilla":
        return f"markov_head_type is {config.markov_head_type}, but vLLM knows only the vanilla head's two matrices"
    return None
