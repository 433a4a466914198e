"""Settings of a capture."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

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
    backend: str = Field("file", description="how records travel from the engine: a backend of hs_connectors")
    backend_config: dict[str, Any] = Field(
        default_factory=dict, description="the backend's settings; empty with `file`: a directory in the workspace"
    )
    codec: str = Field("none", description="how states are encoded on the way")
    concurrency: int = Field(32, ge=1, description="requests in flight at once")
    max_num_seqs: int = Field(16, ge=1, description="sequences in one engine step")
    max_num_batched_tokens: int | None = Field(
        None,
        ge=1,
        description="tokens in one engine step; null: 1024 on a CPU, else vLLM's default",
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
