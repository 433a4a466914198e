"""What measured runs leave behind: typed records, and how they lie on disk."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np
from pydantic import Field, ValidationError

from speculators_core.errors import EvaluationError
from speculators_core.evaluation.report import (
    Divergence,
    Identity,
    MeasuredBy,
    PromptCounts,
    Speed,
    read_jsonl,
    write_jsonl,
    write_text,
)
from speculators_core.types import StrictModel

log = logging.getLogger(__name__)


class EvaluationPrompt(Protocol):
    """What a run needs of a prompt."""

    @property
    def id(self) -> str:
        """Unique in its set."""
        ...

    @property
    def domain(self) -> str:
        """Label to report by."""
        ...

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        """The prompt as the verifier reads it."""
        ...


class Baseline(StrictModel):
    """The verifier alone on all prompts, timed, and on `repeated` of them once more, in another order.

    divergences: of the second run from the first.
    """

    verifier_fingerprint: str
    runtime_key: str
    vllm: str
    prompts: str
    count: int
    max_new_tokens: int
    concurrency: int
    tokens: int
    seconds: float
    engine_seconds: float
    repeated: int
    divergences: tuple[Divergence, ...]

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over the wall time of the first run."""
        return self.tokens / self.seconds


class Measurement(StrictModel):
    """One run with a draft; drafts, accepted and per_position are the engine's counters over exactly this run.

    measured_by: an engine that serves the draft, or the reference loop, which counts by the same rules.
    """

    identity: Identity
    measured_by: MeasuredBy = "engine"
    k: int
    count: int
    max_new_tokens: int
    concurrency: int
    drafts: int
    draft_tokens: int
    accepted: int
    accepted_per_position: tuple[int, ...]
    tokens: int
    seconds: float
    engine_seconds: float
    divergences: tuple[Divergence, ...] | None
    per_prompt: tuple[PromptCounts, ...] = Field(default=(), exclude=True)

    @property
    def tokens_per_step(self) -> float:
        """Generated tokens over the verifier's steps for them: AL, with the steps that drafted nothing counted too."""
        return self.tokens / (self.tokens - self.accepted)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over the wall time of the run."""
        return self.tokens / self.seconds


class SpeedMeasurement(StrictModel):
    """Speed of one draft by alternating arms, at each concurrency; identity.prompts are those of a round."""

    identity: Identity
    speeds: tuple[Speed, ...]


def prompts_digest(prompts: Sequence[EvaluationPrompt]) -> str:
    """sha256 over ids, domains and token ids, in order: two runs with one digest saw the same prompts."""
    content = [[prompt.id, prompt.domain, list(prompt.prompt_token_ids)] for prompt in prompts]
    return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()


def read_baseline(directory: Path) -> Baseline:
    """Read what `measure_baseline` wrote; EvaluationError where it is not whole."""
    try:
        return Baseline.model_validate_json((directory / "baseline.json").read_text())
    except (OSError, ValidationError) as error:
        raise EvaluationError(f"{directory} holds no baseline: {error}", mend="measure it again") from error


def read_measurement(directory: Path) -> Measurement:
    """Read what `measure_draft` wrote, per-prompt counts included; EvaluationError where it is not whole."""
    try:
        measurement = Measurement.model_validate_json((directory / "measurement.json").read_text())
        return measurement.model_copy(update={"per_prompt": read_jsonl(directory / "per_prompt.jsonl")})
    except (OSError, ValidationError, ValueError) as error:
        raise EvaluationError(f"{directory} holds no measurement: {error}", mend="measure it again") from error


def write_measurement(output: Path, measurement: Measurement) -> None:
    """Write measurement.json and per_prompt.jsonl into `output`."""
    output.mkdir(parents=True, exist_ok=True)
    write_jsonl(output / "per_prompt.jsonl", measurement.per_prompt)
    write_text(output / "measurement.json", measurement.model_dump_json(indent=2) + "\n")
    al, by = 1 + measurement.accepted / max(measurement.drafts, 1), measurement.measured_by
    log.info(
        "draft=%s al=%.3f k=%d prompts=%d by=%s",
        measurement.identity.draft[:12],
        al,
        measurement.k,
        measurement.count,
        by,
    )


def read_speed(directory: Path) -> SpeedMeasurement:
    """Read what `measure_speed` wrote; EvaluationError where it is not whole."""
    try:
        return SpeedMeasurement.model_validate_json((directory / "speed.json").read_text())
    except (OSError, ValidationError) as error:
        raise EvaluationError(f"{directory} holds no measured speed: {error}", mend="measure it again") from error


def write_replies(path: Path, replies: Sequence[Sequence[int]]) -> None:
    """Token ids of replies: `token_ids` int32 [tokens] and `offsets` int64 [replies + 1]."""
    from safetensors.numpy import save_file

    lengths = [len(reply) for reply in replies]
    tokens = [token for reply in replies for token in reply]
    part = path.with_name(path.name + ".part")
    save_file(
        {
            "token_ids": np.asarray(tokens, dtype=np.int32),
            "offsets": np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64),
        },
        part,
    )
    part.replace(path)


def read_replies(path: Path) -> list[tuple[int, ...]]:
    """What `write_replies` wrote; EvaluationError where it is not whole."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        tensors = load_file(path)
        tokens, offsets = tensors["token_ids"], tensors["offsets"]
    except (OSError, SafetensorError, KeyError) as error:
        raise EvaluationError(f"{path} holds no replies: {error}", mend="measure the baseline again") from error
    return [tuple(tokens[a:b].tolist()) for a, b in pairwise(offsets.tolist())]
