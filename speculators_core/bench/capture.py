"""How much capturing costs: the same requests through one vLLM with our connector, and without.

Rules: same verifier, requests, dtype and concurrency on both sides; prefix caching off on both, or a repeated prompt
would cost nothing; all engines stand from the beginning, and the one that has no request sleeps; one unmeasured pass
each, then all sides take turns, there and back; the ratio is the median of those of each turn, since a machine's speed
wanders: many short passes tell more than few long ones. Capturing is measured as it is used: requests, records read
back and deleted; of prompts also gates, and shards on disk.
"""

from __future__ import annotations

import operator
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

from pydantic import Field

from hs_connectors.contract import Reader
from hs_connectors.registry import open_reader
from speculators_core.engine.client import Generation, GenerationRequest
from speculators_core.engine.config import NO_PREFIX_CACHING
from speculators_core.engine.runtime import Runtime, probe_runtime
from speculators_core.engine.server import Engine, ServerSpec, serve
from speculators_core.states.capture import bytes_per_token, capture, capture_server
from speculators_core.states.collect import Row, Rows, each, ids_of
from speculators_core.states.config import CaptureConfig
from speculators_core.states.source import fetch_record
from speculators_core.states.stores import provided_store
from speculators_core.types import StrictModel
from speculators_core.verifier.facts import read_facts

Work = Literal["prefill", "generate"]
Side = Callable[[Work], float]
"""What does one pass of some work on an engine; its seconds."""
_READERS = 2


class BatchSettings(StrictModel):
    """What decides how vLLM batches."""

    max_num_seqs: int = Field(ge=1, description="sequences in one engine step")
    max_num_batched_tokens: int | None = Field(ge=1, description="tokens in one engine step; null: vLLM's default")


class Comparison(StrictModel):
    """Passes with one store, and those without a connector that alternated with them."""

    work: Work = Field(description="prefill: prompts alone · generate: replies to their beginnings")
    store: str = Field(description="where records went")
    settings: BatchSettings = Field(description="how the engine without a connector batched")
    plain: tuple[float, ...] = Field(description="tokens/s of each of its passes: of the prompts, or generated")
    captured: tuple[float, ...] = Field(description="the same of the engine that captures")
    ratio: float = Field(description="captured / plain: the median over passes that neighboured")
    fastest: bool = Field(description="whether no other settings made the plain engine faster: this ratio counts")

    def line(self) -> str:
        """For a terminal."""
        plain, captured = statistics.median(self.plain), statistics.median(self.captured)
        return (
            f"{self.work:<9} {self.settings.max_num_seqs:>12} {self.settings.max_num_batched_tokens or 'default':>14} "
            f"{plain:>12.0f} {captured:>14.0f} {self.ratio:>6.3f}{'*' if self.fastest else ' '} {self.store}"
        )


class CaptureBenchReport(StrictModel):
    """Capture against the same work without a connector."""

    vllm: str = Field(description="version of the runtime")
    device: str = Field(description="its device")
    layer_ids: tuple[int, ...] = Field(description="captured layers")
    rows: int = Field(description="requests of one pass")
    tokens: int = Field(description="tokens of all prompts of one pass")
    new_tokens: int = Field(description="tokens generated for each request, where that was measured")
    concurrency: int = Field(description="requests in flight on both sides")
    comparisons: tuple[Comparison, ...] = Field(description="for each work, setting and store")

    def table(self) -> str:
        """For a terminal."""
        return "\n".join(
            [
                f"{self.rows} prompts, {self.tokens} tokens, layers {list(self.layer_ids)}, "
                f"vLLM {self.vllm} on {self.device}, {self.concurrency} requests at once",
                f"{'work':<9} {'max_num_seqs':>12} {'batched tokens':>14} {'plain tok/s':>12} {'captured tok/s':>14} "
                f"{'ratio':>6}  store",
                *(comparison.line() for comparison in self.comparisons),
                "* against the fastest engine without a connector; the goal is at least 0.95, and 0.85 for s3",
            ]
        )


def bench_capture(
    rows: Rows,
    verifier_dir: Path,
    runtime: Runtime,
    layer_ids: Sequence[int],
    fingerprint: str,
    configs: Sequence[CaptureConfig],
    *,
    home: Path,
    scratch: Path,
    settings: Sequence[BatchSettings],
    passes: int = 3,
    max_rows: int = 200,
    new_tokens: int = 0,
) -> CaptureBenchReport:
    """Measure capture as each of `configs` says it against plain engines. Takes an engine start for each of both.

    Args:
        configs: alike but for the store; the engines of all of them stand at the same time.
        scratch: directory for what is written and thrown away.
        settings: of the engines without a connector, one after the other.
        passes: measured passes for each side and setting.
        max_rows: requests of one pass, the first of `rows`.
        new_tokens: how many to generate for the prompt that each row begins with, as a second kind of work; 0: none.

    Raises:
        EngineError: a server does not start.
        CaptureError: a gate fails, or a store does not start.
    """
    told = [config.model_copy(update={"parity_rows": 0}) for config in configs]
    case = _Case(_First(rows, max_rows), new_tokens, verifier_dir, runtime, tuple(layer_ids), fingerprint, home)
    found: list[Comparison] = []
    shutil.rmtree(scratch, ignore_errors=True)
    with ExitStack() as held:
        held.callback(shutil.rmtree, scratch, ignore_errors=True)
        sides = [
            held.enter_context(case.capturing(config, scratch.absolute() / str(number)))
            for number, config in enumerate(told)
        ]
        for setting in settings:
            with case.plain(told[0], setting) as plain:
                for work, tokens in case.tokens.items():
                    turns = [_turn((plain, *sides), work, backwards=turn % 2 == 1) for turn in range(1 + passes)]
                    speeds = [tuple(tokens / seconds for seconds in side) for side in zip(*turns[1:], strict=True)]
                    found += [
                        Comparison(
                            work=work,
                            store=config.backend,
                            settings=setting,
                            plain=speeds[0],
                            captured=captured,
                            ratio=statistics.median(map(operator.truediv, captured, speeds[0])),
                            fastest=False,
                        )
                        for config, captured in zip(told, speeds[1:], strict=True)
                    ]
    info = probe_runtime(runtime, home=home)
    return CaptureBenchReport(
        vllm=info.vllm,
        device=info.device,
        layer_ids=tuple(layer_ids),
        rows=case.rows.num_rows,
        tokens=case.tokens["prefill"],
        new_tokens=new_tokens,
        concurrency=told[0].concurrency,
        comparisons=mark_fastest(found),
    )


def _turn(sides: Sequence[Side], work: Work, *, backwards: bool) -> list[float]:
    """Seconds of each side, one after the other: what slows the machine for a while slows neighbours alike."""
    order = range(len(sides))[:: -1 if backwards else 1]
    seconds = {number: sides[number](work) for number in order}
    return [seconds[number] for number in range(len(sides))]


def mark_fastest(comparisons: Sequence[Comparison]) -> tuple[Comparison, ...]:
    """The same, marked where the plain engine was the fastest at that work."""
    best: dict[Work, float] = {}
    for one in comparisons:
        best[one.work] = max(best.get(one.work, 0.0), statistics.median(one.plain))
    return tuple(
        one.model_copy(update={"fastest": statistics.median(one.plain) == best[one.work]}) for one in comparisons
    )


class _First:
    """The first rows of a data set."""

    def __init__(self, rows: Rows, count: int) -> None:
        self._rows = rows
        self.num_rows = min(count, rows.num_rows)

    def row(self, index: int, /) -> Row:
        return self._rows.row(index)


class _Case:
    """What all sides do, and how each of them is started."""

    def __init__(
        self,
        rows: _First,
        new_tokens: int,
        verifier_dir: Path,
        runtime: Runtime,
        layer_ids: tuple[int, ...],
        fingerprint: str,
        home: Path,
    ) -> None:
        self.rows = rows
        self._verifier_dir, self._runtime, self._home = verifier_dir, runtime, home
        self._layer_ids, self._fingerprint = layer_ids, fingerprint
        ids = [tuple(ids_of(row).tolist()) for row in each(rows)]
        self._context = max(map(len, ids)) + new_tokens
        self._requests: dict[Work, list[GenerationRequest]] = {"prefill": _requests(ids, 1)}
        self.tokens: dict[Work, int] = {"prefill": sum(map(len, ids))}
        if new_tokens:
            prompts = [ids[n][: max(1, int(row.loss_mask.int().argmax()))] for n, row in enumerate(each(rows))]
            self._requests["generate"] = _requests(prompts, new_tokens)
            self.tokens["generate"] = new_tokens * len(prompts)

    @contextmanager
    def plain(self, config: CaptureConfig, settings: BatchSettings) -> Iterator[Side]:
        """An engine without a connector, for the length of a `with` block."""
        without = {"speculative": None, "kv_transfer": None, **settings.model_dump()}
        spec = self._spec(config).model_copy(update=without)
        with serve(self._runtime, spec, home=self._home) as engine:
            yield lambda work: self._ask(engine, work, config)

    @contextmanager
    def capturing(self, config: CaptureConfig, place: Path) -> Iterator[Side]:
        """An engine that captures, and its store where the settings leave that open; sets are written to `place`."""
        per_token = bytes_per_token(read_facts(self._verifier_dir), self._layer_ids, config.dtype)
        with provided_store(config, self._context, per_token, self._home) as config:
            if config.backend == "file" and not config.backend_config:
                # Beside the set: it belongs to the running engine and outlives the passes.
                config = config.model_copy(update={"backend_config": {"root": f"{place}-records", "fsync": False}})
            with serve(self._runtime, self._spec(config), home=self._home) as engine:
                yield lambda work: self._capture(engine, work, config, place)

    def _spec(self, config: CaptureConfig) -> ServerSpec:
        spec = capture_server(
            config,
            self._verifier_dir,
            self._layer_ids,
            self._fingerprint,
            Path(),
            max_model_len=self._context + 9,
            device=probe_runtime(self._runtime, home=self._home).device,
        )
        return spec.model_copy(update={"extra_args": (*spec.extra_args, NO_PREFIX_CACHING)})

    def _capture(self, engine: Engine, work: Work, config: CaptureConfig, place: Path) -> float:
        if work == "generate":
            return self._ask(engine, work, config, open_reader(config.backend, config.backend_config))
        shutil.rmtree(place, ignore_errors=True)
        told = (self._layer_ids, self._fingerprint, config, place)
        return capture(self.rows, engine, *told, verifier_dir=self._verifier_dir).seconds

    def _ask(self, engine: Engine, work: Work, config: CaptureConfig, reader: Reader | None = None) -> float:
        """Seconds until every request was answered, and every record read and deleted where there is a reader."""

        def take(generation: Generation) -> None:
            if reader is not None:
                fetch_record(generation, reader, engine.check, config.record_timeout_s)

        with engine.client() as client, ThreadPoolExecutor(_READERS, thread_name_prefix="records") as pool:
            started = time.monotonic()
            answers = client.generate(self._requests[work], concurrency=config.concurrency)
            for taken in [pool.submit(take, answer) for answer in answers]:
                taken.result()
            return time.monotonic() - started


def _requests(prompts: Sequence[tuple[int, ...]], max_tokens: int) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            id=str(number),
            prompt_token_ids=ids,
            max_tokens=max_tokens,
            ignore_eos=True,
            kv_transfer_params={"include_output_tokens": max_tokens > 1},
        )
        for number, ids in enumerate(prompts)
    ]
