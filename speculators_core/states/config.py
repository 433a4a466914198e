"""Settings of a capture, and of states that training asks for while it runs."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeInt, field_validator, model_validator

from speculators_core.engine.remote import BACKEND_NAMES, BackendName, CaptureTerms
from speculators_core.engine.runtime import Runtime
from speculators_core.types import StrictModel


class CaptureConfig(StrictModel):
    """How the verifier's hidden states are captured. Only source, dtype and layers change what is captured."""

    source: Literal["engine", "hf"] = Field(
        "engine", description="vLLM, or a Hugging Face forward for families whose states vLLM cannot hand out"
    )
    dtype: Literal["bfloat16", "float16", "float32"] = Field("bfloat16", description="dtype that the verifier runs in")
    runtime: Runtime | None = Field(
        None, description="the vLLM that captures, where it is another than the recipe's `runtime`"
    )
    backend: BackendName = Field("file", description=f"how records travel from the engine: {BACKEND_NAMES}")
    backend_config: dict[str, Any] = Field(
        default_factory=dict,
        description="the backend's settings; empty with `file`: a directory in the workspace; with `shm` and "
        "`mooncake`: a store on this host that lives as long as the engines",
    )
    codec: Literal["none", "fp8"] = Field(
        "none", description="how states are encoded on the way; fp8 takes half the bytes of bfloat16"
    )
    concurrency: int = Field(32, ge=1, description="requests in flight at once")
    max_num_seqs: int = Field(16, ge=1, description="sequences in one engine step")
    max_num_batched_tokens: int | None = Field(
        None,
        ge=1,
        description="tokens in one engine step; null: 1024 on a CPU, else vLLM's default",
    )
    prefix_caching: bool = Field(
        True,
        description="whether rows share states of common beginnings; false: with max_num_seqs=1 a row's states are the "
        "same bits in whatever order rows come",
    )
    kv_cache_gib: float = Field(
        2.0, gt=0, description="memory for the engine's cache, which also holds the states, GiB"
    )
    shard_tokens: int = Field(
        16384, ge=1, description="tokens in a shard: what a kill can lose, and the unit of memory while writing"
    )
    retries: int = Field(2, ge=0, description="further tries for a row whose capture failed")
    record_timeout_s: float = Field(
        60.0, gt=0, description="how long a finished request's record may take to appear, s"
    )
    parity_rows: int = Field(4, ge=0, description="rows that are compared with a Hugging Face forward; 0: none")
    parity_tokens: int = Field(256, ge=2, description="leading tokens of each such row that are compared")
    parity_cosine: float = Field(0.999, ge=0, le=1, description="least mean cosine that a layer of such a row may have")
    parity_memory_gib: float = Field(
        16.0,
        gt=0,
        description="largest size of the verifier in memory for that comparison, GiB; beyond it, the "
        "engine's next tokens are compared with those that the captured states give",
    )


class Seat(StrictModel):
    """One engine that captures."""

    runtime: Runtime | None = Field(
        None,
        description="a vLLM of its own: another interpreter, or a server, of the version, build and device that "
        "`capture` uses; null: that one itself",
    )
    cores: tuple[NonNegativeInt, ...] | None = Field(None, description="processors that it may use; null: all of them")

    @model_validator(mode="after")
    def _ours(self) -> Seat:
        if self.cores is not None and self.runtime is not None and self.runtime.url is not None:
            raise ValueError("`cores` is for engines that draftsmith starts itself")
        return self


class HiddenStatesConfig(StrictModel):
    """Whether states are captured before training, or asked for while it runs. Nothing here changes their content."""

    mode: Literal["offline", "online", "hybrid"] = Field(
        "offline",
        description="offline: captured before training · online: streamed from engines that run beside it, only "
        "held-out rows are kept · hybrid: the same, and rows are kept as far as `cache_gib` goes, those of replies "
        "that the verifier makes from the requests that make them",
    )
    engines: tuple[Seat, ...] = Field(
        (Seat(),),
        min_length=1,
        max_length=1024,
        description="engines that capture; several share the rows of either mode",
    )
    trainer_cores: tuple[NonNegativeInt, ...] | None = Field(
        None, description="processors that training beside engines may use; null: all of them"
    )
    window_tokens: int = Field(
        32768, ge=1, description="tokens asked for ahead of the step: bounds memory, and what a stop throws away"
    )
    cache_gib: float = Field(0.0, ge=0, description="with hybrid: bytes of training rows kept for later epochs, GiB")
    patience_s: float = Field(
        300.0,
        gt=0,
        description="how long training waits while no engine answers, and none is being started, before it stops with "
        "the cause, s",
    )
    restarts: int = Field(3, ge=0, description="times that each engine of ours is started again after it died")
    lease_s: float = Field(
        900.0, gt=0, description="age after which a record in a shared store is a dead reader's, and is removed, s"
    )

    @property
    def streamed(self) -> bool:
        """Whether training asks for its states, and nothing is captured before it."""
        return self.mode != "offline"

    @field_validator("engines", mode="before")
    @classmethod
    def _some(cls, value: Any) -> Any:
        short = isinstance(value, int) and not isinstance(value, bool) and 0 < value <= 1024
        return [{}] * value if short else value

    @model_validator(mode="after")
    def _fits(self) -> HiddenStatesConfig:
        if self.cache_gib and self.mode != "hybrid":
            raise ValueError("`cache_gib` belongs to mode hybrid")
        if self.mode == "hybrid" and not self.cache_gib:
            raise ValueError("mode hybrid needs `cache_gib`: how much may be kept")
        return self


class OnlineRequest(StrictModel):
    """All that a training process is told about states that no set holds yet."""

    dataset: str = Field(description="directory of the token rows")
    dataset_digest: str = Field(description="digest of their content")
    terms: CaptureTerms = Field(description="what every engine must be found to capture")
    command: tuple[str, ...] = Field(description="how a server that captures this is started, for messages")
    hidden_size: int = Field(ge=1, description="H")
    book: str = Field(description="file that lists the engines as they are now")
    cache: str = Field(description="directory of the rows that are kept")
    capture: CaptureConfig = Field(description="concurrency, retries and time limits of the requests")
    states: HiddenStatesConfig = Field(description="window, cache and patience")
    ranks: int = Field(1, ge=1, description="training processes that share window and requests")
    without_last: bool = Field(False, description="whether rows end before their last token, which was never an input")
