"""The three tensors of a verifier that a draft borrows: embedding, output head, final norm.

They are read by exact key from safetensors, one at a time; the rest of the model is never loaded. A head that cannot
be read as it is (packed, quantised, biased) is refused: falling back to the embedding would train a draft towards
the wrong distribution without a word.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, NonNegativeInt, TypeAdapter, ValidationError

from speculators_core.errors import VerifierError
from speculators_core.verifier.facts import VerifierFacts, read_config, read_facts

if TYPE_CHECKING:
    from torch import Tensor

    from speculators_core.verifier.files import VerifierFiles

log = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
EMBEDDING_KEYS = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "model.text_model.embed_tokens.weight",
    "model.tok_embeddings.weight",
    "backbone.embeddings.weight",
    "transformer.wte.weight",
)
HEAD_KEYS = (
    "lm_head.weight",
    "language_model.lm_head.weight",
    "model.lm_head.weight",
    "model.language_model.lm_head.weight",
    "output.weight",
)
NORM_KEYS = (
    "model.norm.weight",
    "model.language_model.norm.weight",
    "language_model.model.norm.weight",
    "model.text_model.norm.weight",
    "model.final_layernorm.weight",
    "model.final_norm.weight",
    "backbone.norm_f.weight",
    "transformer.ln_f.weight",
)
_LONGEST_HEADER = 100_000_000  # of a safetensors file: the format's own limit
_PLAIN_DTYPES = frozenset({"F32", "F16", "BF16"})


@dataclass(frozen=True)
class VerifierHead:
    """embed_VH [V, H] · head_VH [V, H] (the same tensor when tied) · norm_H [H] as stored; all in the stored dtype."""

    embed_VH: Tensor
    head_VH: Tensor
    norm_H: Tensor

    @property
    def tied(self) -> bool:
        """Whether head and embedding are one tensor."""
        return self.head_VH is self.embed_VH


def weight_files(verifier_dir: Path) -> list[Path]:
    """The safetensors files that hold the model, sorted by name.

    Raises:
        VerifierError: none exist, the index names one that is missing, or only other formats are there.
    """
    read_config(verifier_dir)
    index = verifier_dir / INDEX
    names = [file.name for file in verifier_dir.iterdir() if file.is_file()]
    mapping = _weight_map(index) if index.is_file() else None
    if mapping is not None:
        names += [name for name in mapping.values() if "/" in name and (verifier_dir / name).is_file()]
    return [verifier_dir / name for name in weight_names(names, mapping, str(verifier_dir))]


def weight_names(names: Collection[str], index: Mapping[str, str] | None, where: str) -> list[str]:
    """Which of a verifier's files hold the model, sorted; `index` is the index's map from tensor to file.

    Raises:
        VerifierError: none do, the index names one that is missing, or only other formats are there.
    """
    if index is not None:
        files = sorted(set(index.values()))
        missing = [name for name in files if name not in names]
        if missing:
            raise VerifierError(f"{where} lacks {', '.join(missing[:3])}, which {INDEX} names", mend="finish the copy")
        return files
    stored = sorted(name for name in names if name.endswith(".safetensors") and "/" not in name)
    files = [name for name in stored if name.startswith("model")] or [
        name for name in stored if not name.startswith("adapter")
    ]
    if files:
        return files
    others = sorted(name for name in names if name.endswith((".bin", ".pt", ".pth", ".gguf")))
    found = f"only {', '.join(others[:3])}" if others else "no weights"
    raise VerifierError(
        f"{where} holds no .safetensors file ({found})",
        mend="convert the verifier with transformers' save_pretrained; pickled weights are never loaded",
    )


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor's bytes lie. kind: dtype as written, and shape · start: first byte in the file."""

    file: str
    kind: tuple[str, tuple[int, ...]]
    start: int
    length: int


class _Entry(BaseModel):
    dtype: str
    shape: tuple[NonNegativeInt, ...]
    data_offsets: tuple[NonNegativeInt, NonNegativeInt]


_ENTRIES = TypeAdapter(dict[str, _Entry])


def read_header(files: VerifierFiles, name: str) -> dict[str, StoredTensor]:
    """Tensors of a safetensors file by name, from its header alone.

    Raises:
        VerifierError: it is torn or no safetensors; says what is wrong.
    """
    length = int.from_bytes(files.read_range(name, 0, 8), "little")
    try:
        if length > _LONGEST_HEADER:
            raise ValueError(f"it claims a header of {length} bytes")
        header = json.loads(files.read_range(name, 8, length))
        if not isinstance(header, dict):
            raise ValueError("its header is no JSON object")
        header.pop("__metadata__", None)
        placed = sorted(_ENTRIES.validate_python(header).items(), key=lambda item: item[1].data_offsets)
        first, end = 8 + length, 0
        for tensor, entry in placed:
            if entry.data_offsets[0] < end or entry.data_offsets[1] < entry.data_offsets[0]:
                raise ValueError(f"the bytes of {tensor} overlap others")
            end = entry.data_offsets[1]
        if end and not files.read_range(name, first + end - 1, 1):
            raise ValueError("it ends before its last tensor")
    except (ValueError, RecursionError) as error:
        reason = str(error)
        if isinstance(error, ValidationError):
            reason = "; ".join(f"{problem['loc'][0]}: {problem['msg']}" for problem in error.errors()[:1])
        raise VerifierError(
            f"{files.where}/{name} is torn or not safetensors: {reason}", mend="copy the verifier again"
        ) from error
    return {
        tensor: StoredTensor(
            name,
            (entry.dtype, entry.shape),
            first + entry.data_offsets[0],
            entry.data_offsets[1] - entry.data_offsets[0],
        )
        for tensor, entry in placed
    }


def read_head(verifier_dir: Path, facts: VerifierFacts | None = None) -> VerifierHead:
    """Read embedding, head and final norm of a local verifier in their stored dtype; other tensors stay on disk.

    Raises:
        VerifierError: a tensor is missing, ambiguous, quantised, biased, or of a shape that config.json denies.
    """
    facts = facts or read_facts(verifier_dir)
    located = locate(verifier_dir)
    embed_key = _find(located, EMBEDDING_KEYS, "embedding", verifier_dir)
    norm_key = _find(located, NORM_KEYS, "final norm", verifier_dir)
    embed = _read(located, embed_key, (facts.vocab_size, facts.hidden_size))
    norm = _read(located, norm_key, (facts.hidden_size,))
    if facts.tie_word_embeddings and not any(key in located for key in HEAD_KEYS):
        return VerifierHead(embed, embed, norm)
    head_key = _find(located, HEAD_KEYS, "output head", verifier_dir)
    bias = head_key.removesuffix("weight") + "bias"
    if bias in located:
        raise VerifierError(f"{verifier_dir}: the output head has a bias ({bias}), which drafts cannot carry")
    head = _read(located, head_key, (facts.vocab_size, facts.hidden_size))
    if facts.tie_word_embeddings:
        import torch

        # As vLLM 0.32 (weight_tying.py) and transformers: a stored head counts where it is another matrix.
        if torch.equal(head, embed):
            return VerifierHead(embed, embed, norm)
        log.warning("%s says that its head is its embedding, and holds another one: that one counts", verifier_dir)
    return VerifierHead(embed, head, norm)


def locate(verifier_dir: Path) -> dict[str, Path]:
    """Tensor name -> the file that holds it; headers only."""
    from safetensors import SafetensorError, safe_open

    index = verifier_dir / INDEX
    files = weight_files(verifier_dir)
    if index.is_file():
        return {name: verifier_dir / file for name, file in _weight_map(index).items()}
    located: dict[str, Path] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                located.update(dict.fromkeys(opened.keys(), file))
        except SafetensorError as error:
            raise VerifierError(f"{file} is torn or not safetensors: {error}", mend="copy it again") from error
    return located


def _find(located: Mapping[str, Path], aliases: Iterable[str], what: str, where: Path) -> str:
    found = [key for key in aliases if key in located]
    if len(found) == 1:
        return found[0]
    if found:
        raise VerifierError(f"{where} holds several tensors that could be the {what}: {', '.join(found)}")
    stems = tuple(key.removesuffix("weight") for key in aliases)
    packed = sorted(key for key in located if key.startswith(stems))
    if packed:
        raise VerifierError(
            f"the {what} of {where} is quantised or packed ({', '.join(packed[:3])}): it cannot be read as a matrix",
            mend="use a checkpoint whose embedding and lm_head are left unquantised (most quantisers can skip them)",
        )
    raise VerifierError(
        f"{where} holds no {what} under a known name (looked for {', '.join(list(aliases)[:3])} …)",
        mend="check that the checkpoint is complete and in transformers' naming",
    )


def _read(located: Mapping[str, Path], key: str, shape: tuple[int, ...]) -> Tensor:
    from safetensors import SafetensorError, safe_open

    file = located[key]
    try:
        with safe_open(file, framework="pt") as opened:
            view = opened.get_slice(key)
            dtype, stored = view.get_dtype(), tuple(view.get_shape())
            if dtype not in _PLAIN_DTYPES:
                raise VerifierError(
                    f"{key} in {file} is stored as {dtype}: a quantised tensor without its scale means nothing",
                    mend="use a checkpoint whose embedding and lm_head are left unquantised",
                )
            # Matrices may be padded beyond the vocabulary; a narrower one contradicts config.json.
            padded = len(shape) == 2 and stored[1:] == shape[1:] and stored[0] >= shape[0]
            if stored != shape and not padded:
                raise VerifierError(f"{key} in {file} has shape {list(stored)}; config.json implies {list(shape)}")
            tensor: Tensor = opened.get_tensor(key)
            return tensor if stored == shape else tensor[: shape[0]].clone()
    except SafetensorError as error:
        raise VerifierError(f"{file} is torn or lacks {key}: {error}", mend="copy the verifier again") from error


def _weight_map(index: Path) -> dict[str, str]:
    return parse_index(index.read_bytes(), str(index))


def parse_index(content: bytes, index: str) -> dict[str, str]:
    """Tensor name -> file name, from a safetensors index. VerifierError where it is none."""
    try:
        mapping = {str(name): str(file) for name, file in json.loads(content)["weight_map"].items()}
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise VerifierError(f"{index} is not a safetensors index: {error}", mend="copy the verifier again") from error
    outside = sorted(file for file in set(mapping.values()) if ".." in file.split("/") or file.startswith("/"))
    if outside:
        raise VerifierError(f"{index} names {outside[0]}, which is none of its files", mend="copy the verifier again")
    return mapping
