"""A draft's directory in a layout that is not ours yet: its config, its tensors' names, and, when asked, the tensors.

Safetensors are read, in one file or several. A pickle runs code when it is opened, so `.bin` and `.pt` files are
refused with the way to convert them; `allow_bin` opens them with torch's restricted unpickler, which makes tensors
and plain containers only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speculators_core.errors import FormatError, VerifierError
from speculators_core.formats.directory import CONFIG, MASK_EMBEDDING, read_config
from speculators_core.verifier.weights import INDEX, locate

if TYPE_CHECKING:
    from torch import Tensor

PICKLED = (".bin", ".pt", ".pth")
SAFE_COMMAND = (
    "python -c \"import torch, safetensors.torch as s; t = torch.load('{name}', map_location='cpu', "
    "weights_only=True); s.save_file({{k: v.contiguous().clone() for k, v in t.items()}}, 'model.safetensors')\""
)
"""What turns a pickled file into one that may be read, without running what else it holds."""


@dataclass(frozen=True)
class Source:
    """A directory with config.json and weights.

    allow_bin: pickled weights may be opened by the restricted unpickler.
    """

    directory: Path
    allow_bin: bool = False

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json; FormatError where there is none."""
        return read_config(self.directory)

    @cached_property
    def names(self) -> frozenset[str]:
        """Names of all tensors; of safetensors, only the headers are read. FormatError where there are no weights."""
        pickled = self._pickled()
        return frozenset(self._located if pickled is None else self._unpickled(pickled))

    def digest(self) -> str:
        """sha256 over every file that is read, wherever the directory lies. FormatError where there are no weights."""
        digest = hashlib.sha256()
        for path in sorted({self.directory / CONFIG, *self._weights()}):
            with path.open("rb") as file:
                name = path.relative_to(self.directory).as_posix()
                digest.update(f"{name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
        return digest.hexdigest()

    def tensors(self) -> dict[str, Tensor]:
        """All tensors on the CPU, and the mask's own embedding where a DFlash draft keeps it in a file of its own."""
        pickled = self._pickled()
        if pickled is not None:
            return dict(self._unpickled(pickled))
        found: dict[str, Tensor] = {}
        for file in sorted(set(self._located.values())):
            with _opened(file) as opened:
                found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 — not a mapping
        mask = self.directory / MASK_EMBEDDING
        if mask.is_file() and "mask_embedding" not in found:
            content = self._unpickled(mask)
            if not {"embedding", ""} & content.keys():
                raise FormatError(f"{mask} holds no embedding")
            found["mask_embedding"] = content["embedding" if "embedding" in content else ""]
        return found

    def _weights(self) -> list[Path]:
        """The files that `tensors` reads, and the index that names them."""
        pickled = self._pickled()
        if pickled is not None:
            return [pickled]
        beside = (self.directory / INDEX, self.directory / MASK_EMBEDDING)
        return [*self._located.values(), *(path for path in beside if path.is_file())]

    @cached_property
    def _located(self) -> Mapping[str, Path]:
        """Tensor name -> the file that holds it; FormatError where an index and the files contradict each other."""
        try:
            located = locate(self.directory)
            if (self.directory / INDEX).is_file():
                self._check_index(located)
        except VerifierError as error:
            raise FormatError(error.what, mend=error.mend) from error
        return located

    def _check_index(self, indexed: Mapping[str, Path]) -> None:
        held = set[tuple[str, Path]]()
        for path in set(indexed.values()):
            with _opened(path) as opened:
                held |= {(name, path) for name in opened.keys()}  # noqa: SIM118 — not a mapping
        problems = [
            f"{found} {', '.join(f'{name} in {path.name}' for name, path in sorted(pairs)[:3])}"
            for found, pairs in (
                ("it names, where there is none,", indexed.items() - held),
                ("it leaves out", held - indexed.items()),
            )
            if pairs
        ]
        if problems:
            raise FormatError(
                f"{self.directory / INDEX} contradicts the weights: {'; '.join(problems)}",
                mend="copy index and weights again, from one source; where the weights lie in one file, remove the "
                "index",
            )

    def _pickled(self) -> Path | None:
        """The pickled file that holds the weights; None where safetensors do."""
        files = sorted(path for path in self.directory.iterdir() if path.is_file())
        if any(path.suffix == ".safetensors" or path.name == INDEX for path in files):
            return None
        pickled = [path for path in files if path.suffix in PICKLED and path.name != MASK_EMBEDDING]
        if len(pickled) > 1:
            raise FormatError(
                f"{self.directory} keeps its weights in {len(pickled)} pickled files",
                mend="convert each of them with `"
                + SAFE_COMMAND.format(name=pickled[0].name)
                + "`, under its own name",
            )
        return pickled[0] if pickled else None

    def _unpickled(self, path: Path) -> Mapping[str, Tensor]:
        """The one place that opens a pickle, where the user has said that it may."""
        import torch

        if not self.allow_bin:
            raise FormatError(
                f"{path} is a pickle, which can run code when it is opened",
                mend=f"in that directory: {SAFE_COMMAND.format(name=path.name)}   (or say --allow-bin, which reads it "
                "with torch's restricted unpickler)",
            )
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # bytes of anybody's run as its opcodes; torch's words advise to open it unguarded
            raise FormatError(
                f"{path} holds more than tensors, or is torn", mend="copy it again, or ask its author for safetensors"
            ) from error
        if isinstance(content, torch.Tensor):
            return {"": content}
        plain = isinstance(content, Mapping) and all(isinstance(name, str) for name in content)
        if not plain:
            raise FormatError(f"{path} holds no tensors by name")
        return {name: value for name, value in content.items() if isinstance(value, torch.Tensor)}


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """A safetensors file; FormatError where it is torn."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except SafetensorError as error:
        raise FormatError(f"{file} is torn or not safetensors: {error}", mend="copy it again") from error
