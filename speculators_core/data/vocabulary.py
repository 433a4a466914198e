"""A draft vocabulary: the verifier's most frequent ids, and the two tables that vLLM maps them with.

d2t int64 [D]: draft id i stands for the verifier's id i + d2t[i].  t2d bool [V]: which of the verifier's ids are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speculators_core.errors import ConfigError, DataError

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor


@dataclass(frozen=True)
class DraftVocabulary:
    """d2t int64 [D] offsets · t2d bool [V]; the D kept ids are ascending, so that both tables say the same."""

    d2t: Tensor
    t2d: Tensor

    @property
    def size(self) -> int:
        """D, the draft's vocabulary size."""
        return int(self.d2t.shape[0])

    @property
    def verifier_size(self) -> int:
        """V, the verifier's vocabulary size."""
        return int(self.t2d.shape[0])

    def verifier_ids(self) -> Tensor:
        """int64 [D]: the verifier's id of each draft id."""
        import torch

        return torch.arange(self.size) + self.d2t

    def coverage(self, counts: Tensor) -> float:
        """Share of counted tokens (int64 [V]) that the draft can say; NaN when nothing was counted."""
        total = float(counts.sum())
        return float(counts[self.t2d].sum()) / total if total else float("nan")


def select_draft_vocabulary(counts: Tensor, draft_size: int, verifier_size: int) -> DraftVocabulary:
    """The `draft_size` most frequent ids; ties go to the smaller id, gaps are filled with the smallest unused ids.

    Args:
        counts: int64 [≤ V], how often each id occurs.
        draft_size: D, 1 ≤ D ≤ V.
        verifier_size: V.

    Raises:
        ConfigError: D is out of range.
        DataError: an id with a count lies beyond the verifier's vocabulary.
    """
    import torch

    check_draft_size(draft_size, verifier_size)
    if counts.shape[0] > verifier_size and int(counts[verifier_size:].sum()):
        raise DataError(
            f"rows hold token ids beyond the verifier's vocabulary of {verifier_size}",
            mend="prepare the data again with this verifier's tokenizer",
        )
    padded = torch.zeros(verifier_size, dtype=torch.int64)
    padded[: counts.shape[0]] = counts[:verifier_size]
    # Unused ids all count 0: the same stable order fills up with the smallest of them.
    order = torch.argsort(padded, descending=True, stable=True)
    return _tables(order[:draft_size].sort().values, verifier_size)


def check_draft_size(draft_size: int, verifier_size: int) -> None:
    """ConfigError unless 1 ≤ draft_size ≤ verifier_size; needs no data, so it can be asked first."""
    if draft_size > verifier_size:
        raise ConfigError(
            f"a draft vocabulary of {draft_size} is larger than the verifier's {verifier_size}: "
            "a draft can only propose tokens that the verifier has",
            mend=f"set draft_vocabulary to at most {verifier_size}, or leave it out to keep the whole vocabulary",
        )
    if draft_size < 1:
        raise ConfigError(f"a draft vocabulary needs at least one token, not {draft_size}")


def load_draft_vocabulary(d2t: Path, t2d: Path, verifier_size: int) -> DraftVocabulary:
    """Tables that the user brings as .npy files (never unpickled): d2t [D] offsets, t2d [V].

    Raises:
        DataError: unreadable, of a wrong shape or dtype, or the two tables contradict each other.
    """
    import torch

    offsets, kept = (torch.from_numpy(_load(path)) for path in (d2t, t2d))
    if offsets.ndim != 1 or kept.ndim != 1 or kept.shape[0] != verifier_size:
        raise DataError(
            f"{d2t} must have shape [D] and {t2d} shape [{verifier_size}]; "
            f"they have {list(offsets.shape)} and {list(kept.shape)}",
            mend="make both tables for this verifier",
        )
    if offsets.is_floating_point() or bool(((kept != 0) & (kept != 1)).any()):
        raise DataError(f"{d2t} must hold whole numbers and {t2d} truth values")
    kept = kept.to(torch.bool)
    ids = torch.nonzero(kept).flatten()
    check_draft_size(int(offsets.shape[0]), verifier_size)
    given = torch.arange(offsets.shape[0]) + offsets.to(torch.int64)
    if not torch.equal(given, ids):
        raise DataError(
            f"{d2t} and {t2d} disagree: i + d2t[i] must run through the ids that t2d keeps, ascending",
            mend="d2t holds offsets (the verifier's id minus the draft's), not ids",
        )
    return _tables(ids, verifier_size)


def _tables(ids: Tensor, verifier_size: int) -> DraftVocabulary:
    import torch

    t2d = torch.zeros(verifier_size, dtype=torch.bool)
    t2d[ids] = True
    return DraftVocabulary(d2t=ids - torch.arange(ids.shape[0]), t2d=t2d)


def _load(path: Path) -> npt.NDArray[Any]:
    import numpy as np

    try:
        table: npt.NDArray[Any] = np.load(path, allow_pickle=False)
        return table
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not a readable .npy file: {error}", mend="write it with numpy.save") from error
