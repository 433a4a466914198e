"""Every error that a user can meet, as one tree.

    DraftsmithError
    ├── ConfigError        a recipe, flag or setting is wrong        (field, mend)
    ├── VerifierError      the verifier directory cannot be used
    ├── DataError          conversations, rows or masks
    ├── StoreError         an artifact is torn, tampered with, or does not fit
    │   └── DiskSpaceError the estimate exceeds what is free
    ├── EngineError        a vLLM server failed to start, died, or answered wrongly
    │   └── EngineTimeout  it did not become ready, or did not answer, in time
    ├── CaptureError       hidden states are missing, mismatched, non-finite or constant
    ├── FormatError        a draft's config.json or tensors are not what vLLM loads
    ├── TrainingError      non-finite loss, torn checkpoint, ranks that disagree
    ├── EvaluationError    acceptance could not be measured
    ├── RegistryError      MLflow refused, or is away
    ├── PlanError          the world has moved since a plan was made
    ├── BudgetError        the recipe's budget is used up, or the next stage would exceed it
    └── Interrupted        a signal asked for a stop; progress is saved

Each message says what is wrong, where, and how to mend it.
"""

from __future__ import annotations


class DraftsmithError(Exception):
    """Base of every error that draftsmith raises for its users.

    Args:
        what: what is wrong and where, in one sentence.
        mend: what the user can do about it; printed on a line of its own.
    """

    def __init__(self, what: str, *, mend: str | None = None) -> None:
        super().__init__(what if mend is None else f"{what}\n  mend: {mend}")
        self.what = what
        self.mend = mend

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.what, self.mend)


def cause_of(error: BaseException) -> str:
    """An error in one sentence: ours in its own words, another with its type."""
    return error.what if isinstance(error, DraftsmithError) else f"{type(error).__name__}: {error}"


def _rebuild(kind: type[DraftsmithError], what: str, mend: str | None) -> DraftsmithError:
    return kind(what, mend=mend)


class ConfigError(DraftsmithError):
    """A recipe, flag or setting is wrong."""


class VerifierError(DraftsmithError):
    """The verifier directory cannot be used."""


class DataError(DraftsmithError):
    """Conversations, rows or loss masks are unusable."""


class StoreError(DraftsmithError):
    """An artifact is torn, tampered with, or cannot be written."""


class DiskSpaceError(StoreError):
    """The estimated size exceeds the free space."""


class EngineError(DraftsmithError):
    """A vLLM server failed to start, died, or answered wrongly."""


class EngineTimeout(EngineError):
    """A vLLM server did not become ready, or did not answer, in time."""


class CaptureError(DraftsmithError):
    """Captured hidden states are missing, mismatched, non-finite or constant."""


class FormatError(DraftsmithError):
    """A draft's config.json or tensors are not what vLLM loads."""


class TrainingError(DraftsmithError):
    """Training cannot go on: non-finite loss, torn checkpoint, ranks that disagree."""


class EvaluationError(DraftsmithError):
    """Acceptance could not be measured."""


class RegistryError(DraftsmithError):
    """MLflow refused a request, or is away."""


class PlanError(DraftsmithError):
    """A plan cannot be applied: the world has moved since it was made."""


class BudgetError(DraftsmithError):
    """The recipe's budget is used up, or the next stage would exceed it; what was done so far is saved."""


class Interrupted(DraftsmithError):
    """A signal asked for a stop; what was done so far is saved."""
