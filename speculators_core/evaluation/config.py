"""What an evaluation measures, and how its numbers are counted."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from speculators_core.engine.config import EngineDtype
from speculators_core.types import MOST_DRAFTED, Json, StrictModel


class SpeedConfig(StrictModel):
    """Speed with and without the draft by alternating arms: measured where the gate requires speed."""

    concurrencies: tuple[PositiveInt, ...] | None = Field(
        default=None,
        min_length=1,
        description="Requests in flight, as the deployment serves them: the draft must pay at each. "
        "null: evaluation.concurrency.",
    )
    rounds: int = Field(default=5, ge=1, description="Alternating rounds of each; fewer than 5 cannot decide at 95 %.")
    max_prompts: int = Field(default=64, ge=1, description="Prompts of a round, the first of the prepared set.")


class EvaluationConfig(StrictModel):
    """Settings of the runs on the engine and of the statistics over them.

    The runs are greedy and stop at the end of the sequence. `run_inputs` names the fields that
    change what the engine does, so that a cached run survives a change of, say, the seed of the bootstrap.
    """

    measured_by: Literal["auto", "engine", "reference"] = Field(
        default="auto",
        description="what counts accepted tokens: the engine, or the reference loop (one sequence at a time, on a "
        "Hugging Face verifier), which proves nothing that could be promoted. auto: the engine, unless pre-flight has "
        "seen that it cannot serve the draft and export.allow_unservable lets it pass.",
    )
    k: int | None = Field(
        default=3, ge=1, le=MOST_DRAFTED, description="Drafted tokens a step; null: what the draft's config names."
    )
    max_prompts: int = Field(default=128, ge=1, description="Prompts to draw, in the order of the prepared set.")
    max_new_tokens: int = Field(default=128, ge=1, description="Longest reply in tokens.")
    repeat_prompts: int = Field(
        default=32,
        ge=1,
        description="Prompts that the verifier alone answers a second time: how far it repeats itself.",
    )
    concurrency: int = Field(default=64, ge=1, description="Requests in flight, the same with and without a draft.")
    warmup_prompts: int = Field(default=2, ge=0, description="Short requests before anything is counted or timed.")
    dtype: EngineDtype = Field(default="bfloat16", description="The engine's dtype.")
    kv_cache_gib: float = Field(default=2.0, gt=0, description="Size of each engine's KV cache in GiB.")
    enforce_eager: bool = Field(default=True, description="No graph capture; set false on a GPU where speed counts.")
    speed: SpeedConfig = Field(default_factory=SpeedConfig, description="How speed is measured where it is gated.")
    startup_timeout_s: float = Field(default=300.0, gt=0, description="Longest wait for an engine to become ready.")
    request_timeout_s: float = Field(default=600.0, gt=0, description="Longest wait for one reply.")

    tie_gap: float = Field(
        default=0.5,
        ge=0,
        description="Largest logit gap (nats) between two tokens that counts as a tie: a few units of bfloat16 "
        "rounding at the size of logits (0.125 to 0.25 between 16 and 64).",
    )
    loop_ngram: int = Field(default=5, ge=1, description="Length of the n-grams that show a looping reply.")
    loop_share: float = Field(default=0.3, ge=0, le=1, description="Replies above this repeated share are loops.")
    confidence: float = Field(default=0.95, gt=0.5, lt=1, description="Of the two-sided interval over prompts.")
    resamples: int = Field(default=10_000, ge=100, le=1_000_000, description="Bootstrap resamples.")
    seed: int = Field(default=0, ge=0, description="Of the bootstrap and of the second baseline's order.")

    def speed_concurrencies(self) -> tuple[int, ...]:
        """Concurrencies to measure speed at, ascending and distinct."""
        return tuple(sorted(set(self.speed.concurrencies or (self.concurrency,))))

    def speed_inputs(self) -> dict[str, Json]:
        """The fields that the cache key of a measurement of speed needs."""
        names = {"k", "max_new_tokens", "warmup_prompts", "dtype", "enforce_eager", "kv_cache_gib"}
        settings = self.speed.model_dump(mode="json", exclude={"concurrencies"})
        return {
            **self.model_dump(mode="json", include=names),
            **settings,
            "concurrencies": list(self.speed_concurrencies()),
        }

    baselines: tuple[Literal["ngram"], ...] = Field(
        default=(), description="Training-free ways to measure beside the draft; each costs an engine start."
    )

    def run_inputs(self, *, speculation: bool) -> dict[str, Json]:
        """The fields that a run's cache key needs; those of a run without speculation leave `k` out."""
        names = {"max_prompts", "max_new_tokens", "concurrency", "warmup_prompts", "dtype", "enforce_eager", "seed"}
        names |= {"k", "loop_ngram"} if speculation else {"repeat_prompts"}
        return self.model_dump(mode="json", include=names)
