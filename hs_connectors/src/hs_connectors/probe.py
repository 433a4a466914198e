"""What a draft is fed and what it answers in a live engine, step by step, as safetensors files.

The engine's side is `hs_connectors.vllm.draft_probe`, off unless DRAFTSMITH_DRAFT_PROBE names a directory; this module
is the layout and the reader. `step-<n>.safetensors` is one call of the engine's drafter for a batch of B requests.

Shape legend: N rows of the batch, the requests one after the other · F features a row · B requests · K drafted tokens
V vocabulary · T rows of one request.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from hs_connectors.errors import RecordError, SettingsError

DIRECTORY_VARIABLE = "DRAFTSMITH_DRAFT_PROBE"
STEPS_VARIABLE = "DRAFTSMITH_DRAFT_PROBE_STEPS"
SCHEMA = "draftsmith.draft-probe/1"
DEFAULT_STEPS = 64
_PATTERN = "step-*.safetensors"


@dataclass(frozen=True)
class ProbeSettings:
    """Where the engine writes and how many drafting steps it records; afterwards it drafts on unobserved."""

    directory: str
    steps: int = DEFAULT_STEPS

    def __post_init__(self) -> None:
        """Refuse what would record nothing."""
        if not self.directory or self.steps < 1:
            raise SettingsError(f"a draft probe needs a directory and at least one step, got {self}")

    def to_environment(self) -> dict[str, str]:
        """The variables that turn the probe on in an engine, which must run the model runner that the probe knows."""
        return {
            DIRECTORY_VARIABLE: str(Path(self.directory).absolute()),
            STEPS_VARIABLE: str(self.steps),
            "VLLM_USE_V2_MODEL_RUNNER": "0",
        }

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> ProbeSettings | None:
        """The settings in such variables, None where the probe is off. SettingsError for a wrong number of steps."""
        directory, steps = environment.get(DIRECTORY_VARIABLE), environment.get(STEPS_VARIABLE, str(DEFAULT_STEPS))
        if not directory:
            return None
        if not steps.isdecimal():
            raise SettingsError(f"{STEPS_VARIABLE} must be a number of steps, got {steps!r}")
        return cls(directory, int(steps))


@dataclass(frozen=True, eq=False)
class ProbedBatch:
    """One call of the drafter.

    request_ids B names · token_ids int64 [N] and positions int64 [N]: the verifier's tokens and where they stand ·
    features [N, F]: the verifier's hidden states of those tokens, before the draft joins them · starts int64 [B] and
    ends int64 [B]: first row and row behind the last one of each request; rows behind belong to rejected tokens ·
    next_token_ids int64 [B]: the token after the last row · drafted int64 [B, K]: what was proposed, in the
    verifier's vocabulary · logits [B, K, V] behind the proposals, −inf where the draft has no such token.
    """

    request_ids: tuple[str, ...]
    token_ids: Tensor
    positions: Tensor
    features: Tensor
    starts: Tensor
    ends: Tensor
    next_token_ids: Tensor
    drafted: Tensor
    logits: Tensor

    def pack(self) -> bytes:
        """As one safetensors payload."""
        tensors = {name: value.contiguous() for name, value in vars(self).items() if isinstance(value, Tensor)}
        metadata = {"schema": SCHEMA, "request_ids": json.dumps(self.request_ids)}
        return bytes(safetensors.torch.save(tensors, metadata))


@dataclass(frozen=True, eq=False)
class ProbedStep:
    """One drafting step of one request, with all that the draft has been fed of it so far.

    token_ids int64 [T]: the verifier's tokens at positions 0 to T − 1 · fed_ids int64 [T]: the token *after* each
    position, as a shifting drafter reads it; the last is the newest · features [T, F] · drafted int64 [K] ·
    logits [K, V].
    """

    request_id: str
    number: int
    token_ids: Tensor
    fed_ids: Tensor
    features: Tensor
    drafted: Tensor
    logits: Tensor


def step_name(number: int) -> str:
    """Key of a step's payload; steps sort by it."""
    return f"step-{number:06d}"


def has_recording(directory: Path) -> bool:
    """Whether a probe has written there."""
    return next(iter(directory.glob(_PATTERN)), None) is not None


def read_batches(directory: Path) -> Iterator[ProbedBatch]:
    """The recorded calls in order. RecordError for a file that is none."""
    for path in sorted(directory.glob(_PATTERN)):
        try:
            with safetensors.safe_open(path, "pt") as file:
                metadata: dict[str, str] = file.metadata() or {}
                tensors: dict[str, Any] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if metadata.get("schema") != SCHEMA:
                raise RecordError(f"{path} has schema {metadata.get('schema')!r}, this reader knows {SCHEMA!r}")
            yield ProbedBatch(request_ids=tuple(json.loads(metadata["request_ids"])), **tensors)
        except (OSError, KeyError, TypeError, ValueError, safetensors.SafetensorError) as error:
            raise RecordError(f"{path} is not a step of a draft probe: {error}", mend="record again") from error


def follow_requests(batches: Iterable[ProbedBatch]) -> Iterator[ProbedStep]:
    """Each request's steps, its context put together from this batch and the ones before.

    A request whose beginning the probe did not see (it was running already, or its prefix came out of the engine's
    cache) is left out: nobody could replay it. RecordError where positions are no plain sequence.
    """
    contexts: dict[str, _Context] = {}
    for number, batch in enumerate(batches):
        for index, request_id in enumerate(batch.request_ids):
            context = contexts.setdefault(request_id, _Context())
            if not context.extend(batch, index):
                continue
            yield ProbedStep(
                request_id=request_id,
                number=number,
                token_ids=context.token_ids,
                fed_ids=context.fed_ids,
                features=context.features,
                drafted=batch.drafted[index],
                logits=batch.logits[index],
            )


class _Context:
    """What the draft's cache holds of one request."""

    def __init__(self) -> None:
        self.token_ids = torch.empty(0, dtype=torch.int64)
        self.fed_ids = torch.empty(0, dtype=torch.int64)
        self.features = torch.empty(0)

    def extend(self, batch: ProbedBatch, index: int) -> bool:
        """Lay this batch's rows over what was there; False where rows before them were never seen."""
        rows = slice(int(batch.starts[index]), int(batch.ends[index]))
        positions = batch.positions[rows]
        first = int(positions[0])
        if first > len(self.fed_ids):
            return False
        if not torch.equal(positions, torch.arange(first, first + len(positions))):
            raise RecordError(f"request {batch.request_ids[index]} jumps within one step: {positions.tolist()[:8]} …")
        # the engine feeds the next token of each row, and to the last one what the verifier has just chosen
        fed = torch.cat([batch.token_ids[rows][1:], batch.next_token_ids[index : index + 1]])
        self.fed_ids = torch.cat([self.fed_ids[:first], fed])
        self.token_ids = torch.cat([self.token_ids[:first], batch.token_ids[rows]])
        before = self.features[:first] if first else batch.features[:0]
        self.features = torch.cat([before, batch.features[rows]])
        return True
