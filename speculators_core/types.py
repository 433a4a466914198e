"""Shapes, values and contracts that every part of the library shares.

Shape legend, used as suffixes of tensor names throughout:
    T tokens of a packed row · R rows · K captured layers · A auxiliary layers (K = A + 1)
    H verifier hidden size · V verifier vocabulary · D draft vocabulary · S TTT steps
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict
from typing_extensions import TypeAliasType

if TYPE_CHECKING:  # keeps `import speculators_core.types` free of torch: command lines start fast
    from torch import Tensor, nn

# a named alias, because pydantic follows a plain recursive union for ever
Json = TypeAliasType("Json", "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None")
Split = Literal["train", "validation", "evaluation"]
MOST_TOKENS = 2**24
"""Of one row, context or vocabulary: far beyond every model, and small enough to allocate."""


def may_hold_secret(address: str) -> bool:
    """Whether a URL has something where passwords and keys are: before an `@`, or behind a `?`.

    A recipe and a site become parameters of runs, lines of logs and parts of reports: such a URL belongs in none.
    """
    return re.search(r"://(?:[^/]*|[^/:]*:(?!\d+/)[^@]*)@|://.*\?", address) is not None


class StrictModel(BaseModel):
    """Base of every configuration and record: frozen, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


MOST_DRAFTED = 256
"""Tokens at a time: no draft has been of use beyond a tenth of them."""


@dataclass(frozen=True)
class Counted:
    """A metric as (sum, count), so that it pools over rows, micro-batches and ranks."""

    sum: float
    count: float

    def __add__(self, other: Counted) -> Counted:
        return Counted(self.sum + other.sum, self.count + other.count)

    @property
    def mean(self) -> float:
        """sum / count; NaN when nothing was counted."""
        return self.sum / self.count if self.count else float("nan")


@dataclass(frozen=True)
class Sample:
    """One captured sequence on its way to the draft.

    input_ids int64 [T] · loss_mask bool [T] (True: a token that the verifier wrote) ·
    hidden_states [T, K, H] in the captured dtype, layers ascending, the last one the
    residual stream *before* the verifier's final norm · position_ids int64 [T].
    """

    input_ids: Tensor
    loss_mask: Tensor
    hidden_states: Tensor
    position_ids: Tensor
    row: int


@dataclass(frozen=True)
class Batch:
    """Aligned samples packed into one row of T tokens.

    input_ids, position_ids, document_ids int64 [T] (document −1 is padding) ·
    loss_mask bool [T] · aux_TAH [T, A·H] features · last_TH [T, H] verifier's last hidden
    states before its final norm. What "aligned" means is the algorithm's own business.
    """

    input_ids: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    document_ids: Tensor
    aux_TAH: Tensor
    last_TH: Tensor


@dataclass(frozen=True)
class StepResult:
    """Outcome of one forward pass: a loss to differentiate and metrics to pool.

    `loss` already holds the division by the global denominators that were passed in.
    """

    loss: Tensor
    metrics: Mapping[str, Counted]


@dataclass(frozen=True)
class Aligned:
    """A sample after the algorithm's own shift: what packing concatenates."""

    input_ids: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    aux_TAH: Tensor
    last_TH: Tensor


class Objective(Protocol):
    """Turns samples into batches' inputs, and batches into loss and counted metrics."""

    def align(self, sample: Sample) -> Aligned:
        """Shift one sample (before packing)."""
        ...

    def denominators(self, batch: Batch) -> Tensor:
        """float64 [terms]: supervised positions of each loss term; summed over micro-batches and ranks."""
        ...

    def step(self, model: nn.Module, batch: Batch, denominators: Tensor) -> StepResult:
        """Forward pass and loss, normalised by the (global) denominators."""
        ...

    def walk(self, model: nn.Module, aligned: Aligned, k: int) -> Sequence[int]:
        """Accepted drafts at each drafting point of one greedy reply, walked as serving would."""
        ...


@dataclass(frozen=True)
class ExportedDraft:
    """A draft as vLLM loads it: config.json's content and the tensors of model.safetensors."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class DraftPlan:
    """What a recipe asks of an algorithm, as far as it is known before anything runs.

    k: tokens that the evaluation shall have drafted at a time; None: the draft's own number.
    """

    verifier_dir: Path
    vocab_size: int
    draft_vocabulary: int | None
    row_tokens: int
    allow_unservable: bool
    k: int | None = None


def accept(config: StrictModel, plan: DraftPlan) -> None:
    """Nothing beyond the typed config can be wrong."""


def no_mask(config: StrictModel, verifier_dir: Path) -> None:
    """No token stands for one to be drafted."""


def same_names(config: StrictModel, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The model names its tensors as its export does."""
    return tensors


@dataclass(frozen=True)
class DraftContext:
    """All that an engine has fed its draft of one request when a drafting step begins, positions 0 to T − 1.

    input_ids int64 [T]: the token *after* each position, the last one the newest · aux_TAH [T, A·H] features of the
    positions, not joined yet: states of the layers that the draft reads, or of the last one where it reads no others.
    """

    input_ids: Tensor
    aux_TAH: Tensor


Choose = Callable[[int, "Tensor"], int]
"""(place in a draft from 0, logits [V] of the token there) -> that token."""


@dataclass(frozen=True)
class Proposer:
    """How an algorithm's own module drafts as it is served: the seam of the reference loop and the parity ladder.

    config       (ExportedDraft) -> the knobs it states; FormatError when it is no such draft
    logits       (model, DraftContext, k, Choose) -> [K, V], −inf for tokens that it cannot propose. `Choose` is asked
                 for every place in order; a draft that continues from its own tokens goes on from the answers
    conventions  boolean knobs to try the other way round when the logits differ from an engine's
    """

    config: Callable[[ExportedDraft], StrictModel]
    logits: Callable[[nn.Module, DraftContext, int, Choose], Tensor]
    conventions: tuple[str, ...] = ()


@dataclass(frozen=True)
class Algorithm:
    """What a folder in `algorithms/` exports; trainer, tasks and flows see nothing else.

    config      typed knobs (a StrictModel with `kind: Literal[name]`)
    build       (config, verifier_dir, draft_vocabulary | None, seed) -> model with frozen verifier parts in place
    objective   (config) -> Objective
    export      (config, model, publish) -> ExportedDraft
    aux_layers  (config, num_hidden_layers) -> auxiliary layer ids, ascending and distinct
    check       (config, DraftPlan) -> None; ConfigError for what could only fail after capture or training
    mask_token  (config, verifier_dir) -> the token that stands for one to be drafted, which text must not hold, or None
    proposer    how its module drafts as it is served; None: not told yet
    stitch      (draft_dir, verifier_dir, target, *, link) -> number of tensors replaced; writes the verifier with the
                draft in it, which vLLM then serves by the method of the algorithm's name; None: a draft is served alone
    names       (config, exported tensors) -> the same by the model's own names, to start training from a draft
    starts_from names of other algorithms whose drafts training may start from
    additions   beginnings of names of trained tensors that the draft to start from may lack: they stay fresh
    """

    name: str
    config: type[StrictModel]
    build: Callable[..., nn.Module]
    objective: Callable[..., Objective]
    export: Callable[..., ExportedDraft]
    aux_layers: Callable[..., tuple[int, ...]]
    check: Callable[..., None] = accept
    mask_token: Callable[..., int | None] = no_mask
    proposer: Proposer | None = None
    stitch: Callable[..., int] | None = None
    names: Callable[..., Mapping[str, Tensor]] = same_names
    starts_from: tuple[str, ...] = ()
    additions: tuple[str, ...] = ()


class ArtifactRef(StrictModel):
    """Address of a published artifact: what tasks pass instead of data.

    digest is the sha256 of the manifest's content (kind, schema version, files), not of its path.
    """

    kind: str
    uri: str
    digest: str


ProgressCallback = Callable[[int, int], None]
"""Called with (done, total) now and then by long work."""

__all__ = [
    "MOST_DRAFTED",
    "MOST_TOKENS",
    "Algorithm",
    "Aligned",
    "ArtifactRef",
    "Batch",
    "Choose",
    "Counted",
    "DraftContext",
    "DraftPlan",
    "ExportedDraft",
    "Json",
    "Objective",
    "ProgressCallback",
    "Proposer",
    "Sample",
    "Split",
    "StepResult",
    "StrictModel",
    "may_hold_secret",
]
