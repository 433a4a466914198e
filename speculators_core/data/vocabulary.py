"""A draft vocabulary: the verifier's most frequent ids or those that a user brings, and the two tables that vLLM maps
them with.

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

    @property
    def digest(self) -> str:
        """sha256 over the kept ids and both sizes: what the vocabulary is, wherever it was read."""
        import hashlib

        ids = ",".join(map(str, self.verifier_ids().tolist()))
        return hashlib.sha256(f"{self.verifier_size}:{ids}".encode()).hexdigest()

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


def given_vocabulary(path: Path, verifier_size: int, size: int | None = None) -> DraftVocabulary:
    """The vocabulary that a user brings; nothing is unpickled.

    Args:
        path: an exported draft's directory, a safetensors file with `d2t`, `t2d` or both, or a .npy file with one of
            them; beside `d2t…npy` its `t2d…npy` is read too, and the other way round.
        size: D as it was announced, if it was.

    Raises:
        ConfigError: there is no such file, or none of these kinds; another size than the announced one.
        DataError: unreadable, of another verifier's size, or the tables contradict each other; see `kept_ids`.
    """
    tables = _stored_tables(path.expanduser())
    if not tables:
        raise DataError(
            f"{path} holds neither d2t nor t2d", mend="name a draft with a reduced vocabulary, or a file with a table"
        )
    try:
        ids = kept_ids(tables.get("d2t"), tables.get("t2d"), verifier_size).sort().values
    except DataError as error:
        raise DataError(f"{path}: {error.what}", mend=error.mend) from None
    if size is not None and size != ids.numel():
        raise ConfigError(f"{path} names {ids.numel()} tokens, and draft_vocabulary is {size}", mend="make them agree")
    check_draft_size(ids.numel(), verifier_size)
    return _tables(ids, verifier_size)


def kept_ids(d2t: Tensor | None, t2d: Tensor | None, verifier_size: int) -> Tensor:
    """int64 [D]: the verifier's id of each draft id, from d2t as distances or as ids, or from t2d alone.

    Args:
        d2t: [D], the verifier's id minus the draft's, or the verifier's id. t2d, where given, tells which.
        t2d: [V], whether the draft can propose the token.

    Raises:
        DataError: no row of whole numbers or truth values, another verifier's size, ids out of range or given twice,
            tables that contradict each other, or a d2t that can be read both ways.
    """
    import torch

    for name, given in (("d2t", d2t), ("t2d", t2d)):
        if given is not None and (given.ndim != 1 or given.is_floating_point() or given.is_complex()):
            raise DataError(f"{name} must hold whole numbers or truth values in one row")
    kept = None
    if t2d is not None:
        if t2d.numel() != verifier_size:
            raise DataError(
                f"t2d is for a verifier of {t2d.numel()} tokens, and this one has {verifier_size}",
                mend="make the tables for this verifier",
            )
        if bool(((t2d != 0) & (t2d != 1)).any()):
            raise DataError("t2d must hold a truth value for each token of the verifier")
        kept = t2d.to(torch.bool).nonzero().flatten()
    if d2t is None:
        assert kept is not None, "one table at least"
        return kept
    table = d2t.to(torch.int64)
    reasons: dict[str, str] = {}
    fitting: list[Tensor] = []
    for meaning, ids in (("distances", torch.arange(table.numel()) + table), ("ids", table)):
        ordered = ids.sort().values
        if table.numel() == 0 or int(ordered[0]) < 0 or int(ordered[-1]) >= verifier_size:
            reasons[meaning] = "out of range"
        elif bool((ordered[1:] == ordered[:-1]).any()):
            reasons[meaning] = "given twice"
        elif kept is not None and not torch.equal(ordered, kept):
            reasons[meaning] = "not those that t2d keeps"
        else:
            fitting.append(ids)
    if not fitting:
        said = "; ".join(f"read as {meaning}, tokens are {reason}" for meaning, reason in reasons.items())
        raise DataError(
            f"d2t does not fit a verifier of {verifier_size} tokens: {said}", mend="make the tables for this verifier"
        )
    if len(fitting) > 1 and not torch.equal(*fitting):
        raise DataError(
            "d2t can be read as distances and as ids, and there is no t2d that would tell",
            mend="put t2d beside it: truth values, one for each token of the verifier",
        )
    return fitting[0]


def _tables(ids: Tensor, verifier_size: int) -> DraftVocabulary:
    import torch

    t2d = torch.zeros(verifier_size, dtype=torch.bool)
    t2d[ids] = True
    return DraftVocabulary(d2t=ids - torch.arange(ids.shape[0]), t2d=t2d)


def _stored_tables(path: Path) -> dict[str, Tensor]:
    import torch
    from safetensors import SafetensorError, safe_open

    file = path / "model.safetensors" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            f"there is no draft vocabulary at {file}", mend="name a file of tables, or a draft's directory"
        )
    if file.suffix == ".npy":
        named = {"d2t": "d2t" in file.name, "t2d": "t2d" in file.name}
        if named["d2t"] == named["t2d"]:
            raise ConfigError(f"{file} does not say which table it is", mend="put d2t or t2d into its name")
        files = {name: file.with_name(file.name.replace("t2d", "d2t").replace("d2t", name)) for name in named}
        return {name: torch.from_numpy(_load(one)) for name, one in files.items() if one.is_file()}
    if file.suffix != ".safetensors":
        raise ConfigError(
            f"{file} is neither .safetensors nor .npy", mend="write the tables with safetensors or numpy.save"
        )
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in ("d2t", "t2d") if name in opened.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise DataError(f"{file} is torn or not safetensors: {error}", mend="copy it again") from error


def _load(path: Path) -> npt.NDArray[Any]:
    import numpy as np

    try:
        table: npt.NDArray[Any] = np.load(path, allow_pickle=False)
        if table.dtype.kind not in "biu":
            raise ValueError(f"it holds {table.dtype}, not whole numbers or truth values")
        return table
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not a readable .npy file: {error}", mend="write it with numpy.save") from error
