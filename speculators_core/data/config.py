"""Typed settings of data preparation, regeneration and synthesis."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from speculators_core.types import MOST_TOKENS, StrictModel


class RegenerationConfig(StrictModel):
    """How the verifier answers the prompts of a data set anew."""

    max_new_tokens: int = Field(512, ge=1, description="Longest reply in tokens.")
    max_context: int | None = Field(None, ge=8, description="Longest prompt and reply; null takes the verifier's.")
    temperature: float = Field(0.0, ge=0.0, description="0 is greedy; above it replies are sampled.")
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="Nucleus of the sampled replies.")
    seed: int = Field(0, ge=0, description="Seed of the sampled replies; each turn draws its own from it.")
    concurrency: int = Field(32, ge=1, description="Conversations in flight at once.")


class DataConfig(StrictModel):
    """How conversations become token rows."""

    sources: tuple[str, ...] = Field(
        min_length=1,
        description="JSON or JSON Lines files, directories of them, or data sets as hf:ID[@REVISION][:SUBSET][:SPLIT].",
    )
    replies: Literal["recorded", "regenerate"] = Field(
        "recorded",
        description="recorded: the data's own. regenerate: the verifier answers the prompts anew, greedily, and its "
        "hidden states are captured in the same requests.",
    )
    regeneration: RegenerationConfig = Field(
        default_factory=RegenerationConfig, description="How it answers; `max_length` bounds prompt and reply."
    )
    max_rows: int | None = Field(None, ge=1, description="Conversations kept, drawn by seeded hash; null keeps all.")
    max_length: int = Field(1024, ge=8, le=MOST_TOKENS, description="Longest row in tokens.")
    overlong: Literal["truncate", "drop"] = Field(
        "truncate",
        description="A longer row is cut at the right while it keeps `min_supervised_tokens`, or is dropped.",
    )
    reply_cap: int | None = Field(
        None,
        ge=1,
        description="Replies of at least this many tokens were cut off by whoever made them: they have no end of turn.",
    )
    min_supervised_tokens: int = Field(1, ge=1, description="Rows with fewer tokens by the verifier are dropped.")
    validation_share: float = Field(0.05, ge=0.0, lt=0.5, description="Share of the conversations for validation.")
    evaluation_prompts: int = Field(
        128,
        ge=0,
        description="Prompts held back for measuring acceptance: in neither training nor validation; at most a quarter "
        "of the conversations.",
    )
    seed: int = Field(0, ge=0, description="Seed of the draws; equal seeds and data give equal rows.")
    template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments for the verifier's chat template, as served."
    )

    @model_validator(mode="after")
    def _captured_replies_are_greedy(self) -> DataConfig:
        if self.replies == "regenerate" and self.regeneration.temperature > 0:
            raise ValueError(
                "regeneration.temperature: sampled replies cannot be captured in the same request; write them with "
                "`draftsmith data regenerate --temperature`, and name that file in data.sources"
            )
        return self


class SynthesisConfig(StrictModel):
    """How the verifier writes its own user turns."""

    prompts: int = Field(1000, ge=1, description="Distinct prompts wanted.")
    max_attempts: int | None = Field(None, ge=1, description="Samples drawn at most; null means four for each prompt.")
    max_new_tokens: int = Field(192, ge=1, description="Longest prompt in tokens; longer ones are thrown away.")
    min_words: int = Field(3, ge=1, description="Shortest prompt in words.")
    temperature: float = Field(1.0, gt=0.0, description="Sampling temperature.")
    top_p: float = Field(0.95, gt=0.0, le=1.0, description="Nucleus of the samples.")
    seed: int = Field(0, ge=0, description="Seed; each sample draws its own from it.")
    concurrency: int = Field(32, ge=1, description="Samples in flight at once.")
    domain: str = Field("synthetic", min_length=1, description="Domain written on the prompts.")
    template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments for the verifier's chat template, as served."
    )
