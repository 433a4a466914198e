"""How a deployment is served, observed, and taken back."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from speculators_core.engine.config import EngineDtype
from speculators_core.types import MOST_DRAFTED, StrictModel


class SampleConfig(StrictModel):
    """Which served conversations are kept, as a recipe's `data.sources` read them; users must have agreed."""

    directory: str = Field(min_length=1, description="where they go, one file for each engine")
    rate: float = Field(0.0, ge=0, le=1, description="share of the permitted requests that is kept, whatever it is")
    acceptance_below: float | None = Field(
        None,
        ge=1,
        description="further, replies whose acceptance length is lower than that; a streamed one tells it only where "
        "its client asks for usage",
    )
    consent: Literal["header", "all"] = Field(
        "header",
        description="header: requests with `x-draftsmith-consent: yes` alone · all: every user agreed, but for "
        "requests whose header says otherwise",
    )
    redact: str | None = Field(
        None, description="MODULE:FUNCTION in the engine's environment: messages to messages, or None to leave out"
    )
    max_bytes: int = Field(256 << 20, ge=1, description="size of a file at which it ends")

    @model_validator(mode="after")
    def _some(self) -> SampleConfig:
        if not self.rate and self.acceptance_below is None:
            raise ValueError("nothing would be kept: give a `rate` above 0, or `acceptance_below`")
        return self


class EngineConfig(StrictModel):
    """The engine of a version."""

    k: int | None = Field(
        None, ge=1, le=MOST_DRAFTED, description="drafted tokens a step; null: what the draft's config names"
    )
    dtype: EngineDtype = Field("bfloat16", description="the engine's dtype")
    max_model_len: int | None = Field(None, ge=1, description="longest context in tokens; null: the verifier's own")
    max_num_seqs: int = Field(64, ge=1, description="sequences per step")
    kv_cache_gib: float = Field(2.0, gt=0, description="KV cache of one engine in GiB; two are up during a roll")
    enforce_eager: bool = Field(True, description="no graph capture: a fast start; set false on a GPU")
    extra_args: tuple[str, ...] = Field((), description="further flags of vLLM's server, as they are")
    sample: SampleConfig | None = Field(None, description="keep served conversations; null: none")
    startup_timeout_s: float = Field(600, gt=0, description="longest wait for an engine to become ready")


class ProbeConfig(StrictModel):
    """What a started engine must show before it takes traffic."""

    prompts: int = Field(8, ge=1, le=8, description="prompts of the built-in set")
    max_tokens: int = Field(48, ge=2, description="longest reply in tokens")
    tie_gap: float = Field(
        0.5, ge=0, description="a reply's token may lie so far (nats) below the verifier's best: rounding at near-ties"
    )
    min_al_share: float = Field(
        0.6, ge=0, le=1, description="least AL on the probe as a share of the registered one; few, general prompts"
    )


class WatchConfig(StrictModel):
    """When a version that took over is taken back; the rules are in `decisions.py`."""

    window_s: float = Field(900, gt=0, description="how long a new version is observed; the displaced one stays up")
    min_drafts: int = Field(1000, ge=2, description="fewer drafting steps say nothing of AL")
    al_margin: float = Field(0.10, ge=0, lt=1, description="tolerated relative loss of AL against what it displaced")
    min_requests: int = Field(50, ge=1, description="fewer finished requests say nothing of errors and time")
    max_error_rate: float = Field(0.02, ge=0, le=1, description="failed share of requests that takes a version back")
    max_slowdown: float | None = Field(
        1.5, gt=1, description="time per output token against the displaced version's; null: not judged by it"
    )
    note_every_s: float = Field(60, gt=0, description="span of one window of counts for the watch over drift")


class AutoDisableConfig(StrictModel):
    """Whether speculation is turned off where the verifier alone is faster."""

    mode: Literal["off", "report", "on"] = Field(
        "report",
        description="report: say when it seems to cost more than it gives; on: try without where two have room, "
        "keep the faster",
    )
    prefill_heavy: float = Field(20, gt=0, description="prompt tokens per generated token that make it doubtful")
    saturated_share: float = Field(0.5, gt=0, le=1, description="share of looks with requests waiting that does so too")
    sustained_s: float = Field(120, gt=0, description="traffic that is looked at, and how long a trial lasts")
    retry_s: float = Field(3600, gt=0, description="pause after a trial, whatever its outcome")


class ServeConfig(StrictModel):
    """Settings of `draftsmith serve`; they change nothing of what is trained or measured."""

    host: str = Field("127.0.0.1", min_length=1, description="address that clients reach; 0.0.0.0: from any host")
    port: int = Field(8000, ge=1, le=65535, description="port that clients reach")
    poll_s: float = Field(2, gt=0, description="between two looks at the registry and at the counters")
    engines: Literal["auto", "beside", "in-place"] = Field(
        "auto",
        description="during a roll: two engines side by side, or one after the other with a pause. auto: side by side "
        "where memory holds both (on a GPU, where that cannot be told, in place)",
    )
    drain_timeout_s: float = Field(600, gt=0, description="longest wait for the requests in flight of a version")
    request_timeout_s: float = Field(600, gt=0, description="longest silence within one reply")
    engine: EngineConfig = Field(default_factory=EngineConfig)
    probe: ProbeConfig = Field(default_factory=ProbeConfig)
    watch: WatchConfig = Field(default_factory=WatchConfig)
    auto_disable: AutoDisableConfig = Field(default_factory=AutoDisableConfig)
