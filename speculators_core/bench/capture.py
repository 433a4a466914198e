"""How much capturing costs: the same prompts through one vLLM with our connector, and without, over batch settings.

Rules: same verifier, prompts, dtype and concurrency on both sides; prefix caching off on both, or a repeated prompt
would cost nothing; one unmeasured pass each, then both sides alternate; medians. Capturing is measured as it is used:
requests, records read back, gates, shards on disk.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from speculators_core.engine.client import GenerationRequest
from speculators_core.engine.config import NO_PREFIX_CACHING
from speculators_core.engine.runtime import Runtime, probe_runtime
from speculators_core.engine.server import Engine, ServerSpec, serve
from speculators_core.states.capture import capture, capture_server
from speculators_core.states.collect import Row, Rows, ids_of
from speculators_core.states.config import CaptureConfig
from speculators_core.types import StrictModel


class BatchSettings(StrictModel):
    """What decides how vLLM batches prefill."""

    max_num_seqs: int = Field(ge=1, description="sequences in one engine step")
    max_num_batched_tokens: int | None = Field(ge=1, description="tokens in one engine step; null: vLLM's default")


class ArmResult(StrictModel):
    """One side at one setting."""

    settings: BatchSettings = Field(description="how its engine batched")
    tokens_per_second: float = Field(description="median over the passes")
    passes: tuple[float, ...] = Field(description="tokens/s of each measured pass")


class CaptureBenchReport(StrictModel):
    """Capture against prefill without a connector."""

    vllm: str = Field(description="version of the runtime")
    device: str = Field(description="its device")
    layer_ids: tuple[int, ...] = Field(description="captured layers")
    rows: int = Field(description="prompts of one pass")
    tokens: int = Field(description="tokens of one pass")
    concurrency: int = Field(description="requests in flight on both sides")
    plain: tuple[ArmResult, ...] = Field(description="prefill without a connector, by setting")
    captured: tuple[ArmResult, ...] = Field(description="capture, measured in turn with each of `plain`")
    fastest_plain: float = Field(description="tokens/s of the fastest setting without a connector")
    capture: float = Field(description="tokens/s of capture: median over all of its passes")
    ratio: float = Field(description="capture / fastest_plain; the goal is at least 0.9")

    def table(self) -> str:
        """For a terminal."""
        lines = [
            f"{self.rows} prompts, {self.tokens} tokens, layers {list(self.layer_ids)}, "
            f"vLLM {self.vllm} on {self.device}, {self.concurrency} requests at once",
            f"{'max_num_seqs':>12} {'batched tokens':>14} {'prefill tok/s':>14} {'capture tok/s':>14} {'ratio':>6}",
        ]
        for plain, captured in zip(self.plain, self.captured, strict=True):
            lines.append(
                f"{plain.settings.max_num_seqs:>12} {plain.settings.max_num_batched_tokens or 'default':>14} "
                f"{plain.tokens_per_second:>14.0f} {captured.tokens_per_second:>14.0f} "
                f"{captured.tokens_per_second / plain.tokens_per_second:>6.3f}"
            )
        lines.append(
            f"capture against the fastest prefill: {self.capture:.0f} / {self.fastest_plain:.0f} = {self.ratio:.3f}"
        )
        return "\n".join(lines)


def bench_capture(
    rows: Rows,
    verifier_dir: Path,
    runtime: Runtime,
    layer_ids: Sequence[int],
    fingerprint: str,
    config: CaptureConfig,
    *,
    home: Path,
    scratch: Path,
    settings: Sequence[BatchSettings],
    passes: int = 3,
    max_rows: int = 200,
) -> CaptureBenchReport:
    """Measure capture as `config` says it, against prefill at each of `settings`. Takes an engine start for each.

    Args:
        scratch: directory for the sets that are written and thrown away.
        passes: measured passes for each side and setting.
        max_rows: prompts of one pass, the first of `rows`.

    Raises:
        EngineError: a server does not start.
        CaptureError: a gate fails.
    """
    some = _First(rows, max_rows)
    requests = [
        GenerationRequest(id=str(position), prompt_token_ids=tuple(ids_of(some.row(position)).tolist()), max_tokens=1)
        for position in range(some.num_rows)
    ]
    tokens = sum(len(request.prompt_token_ids or ()) for request in requests)
    longest = max(len(request.prompt_token_ids or ()) for request in requests)
    directory = scratch / "bench-capture"
    workspace = directory / "set"
    # The records' directory belongs to the running engine and outlives the sets.
    backend = config.backend_config or {"root": str(directory.absolute() / "records"), "fsync": False}
    config = config.model_copy(update={"parity_rows": 0, "backend_config": backend})
    shutil.rmtree(directory, ignore_errors=True)
    device = probe_runtime(runtime, home=home).device
    spec = capture_server(
        config, verifier_dir, layer_ids, fingerprint, workspace, max_model_len=longest + 9, device=device
    )
    own = BatchSettings(max_num_seqs=spec.max_num_seqs, max_num_batched_tokens=spec.max_num_batched_tokens)
    spec = spec.model_copy(update={"extra_args": (*spec.extra_args, NO_PREFIX_CACHING)})
    plain, captured = [], []
    try:
        with serve(runtime, spec, home=home) as capturing:

            def capture_pass() -> float:
                shutil.rmtree(workspace, ignore_errors=True)
                report = capture(some, capturing, layer_ids, fingerprint, config, workspace, verifier_dir=verifier_dir)
                return report.tokens_per_second

            capture_pass()
            for setting in settings:
                with serve(runtime, _plain(spec, setting), home=home) as prefilling:
                    _prefill(prefilling, requests, config.concurrency)
                    pairs = [
                        (tokens / _prefill(prefilling, requests, config.concurrency), capture_pass())
                        for _ in range(passes)
                    ]
                plain.append(_arm(setting, [pair[0] for pair in pairs]))
                captured.append(_arm(own, [pair[1] for pair in pairs]))
            info = capturing.info
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    fastest = max(arm.tokens_per_second for arm in plain)
    middle = statistics.median(value for arm in captured for value in arm.passes)
    return CaptureBenchReport(
        vllm=info.vllm,
        device=info.device,
        layer_ids=tuple(layer_ids),
        rows=len(requests),
        tokens=tokens,
        concurrency=config.concurrency,
        plain=tuple(plain),
        captured=tuple(captured),
        fastest_plain=fastest,
        capture=middle,
        ratio=middle / fastest,
    )


class _First:
    """The first rows of a data set."""

    def __init__(self, rows: Rows, count: int) -> None:
        self._rows = rows
        self.num_rows = min(count, rows.num_rows)

    def row(self, index: int, /) -> Row:
        return self._rows.row(index)


def _plain(spec: ServerSpec, settings: BatchSettings) -> ServerSpec:
    return spec.model_copy(
        update={
            "speculative": None,
            "kv_transfer": None,
            "max_num_seqs": settings.max_num_seqs,
            "max_num_batched_tokens": settings.max_num_batched_tokens,
        }
    )


def _prefill(engine: Engine, requests: Sequence[GenerationRequest], concurrency: int) -> float:
    """Seconds that one pass over all prompts takes."""
    with engine.client() as client:
        started = time.monotonic()
        for _ in client.generate(requests, concurrency=concurrency):
            pass
        return time.monotonic() - started


def _arm(settings: BatchSettings, passes: Sequence[float]) -> ArmResult:
    return ArmResult(settings=settings, tokens_per_second=statistics.median(passes), passes=tuple(passes))
