"""Token rows on disk, as `prepare` writes them and everything after reads them.

rows.safetensors   input_ids int32 [N] · loss_mask uint8 [N] · offsets int64 [R + 1] · split uint8 [R] (0 train,
                   1 validation): all rows end to end
rows.jsonl         one line a row: id, domain, split, conversation, turns
evaluation.jsonl   one line a prompt held back for measuring acceptance
samples.jsonl      messages of some rows, so that the engine's own rendering can be compared
report.json        what was read, kept and dropped, and why
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from speculators_core.errors import DataError
from speculators_core.types import Split, StrictModel

if TYPE_CHECKING:
    from torch import Tensor

ROWS, RECORDS, PROMPTS, SAMPLES, REPORT = (
    "rows.safetensors",
    "rows.jsonl",
    "evaluation.jsonl",
    "samples.jsonl",
    "report.json",
)
SPLITS: tuple[Split, ...] = ("train", "validation")


@dataclass(frozen=True)
class Row:
    """input_ids int64 [T] · loss_mask bool [T], True for tokens that the verifier wrote."""

    index: int
    id: str
    domain: str
    split: Split
    input_ids: Tensor
    loss_mask: Tensor


class Prompt(StrictModel):
    """A prompt that no draft trains on. Text stays in the artifact store."""

    id: str = Field(description="The conversation's id.")
    domain: str = Field(description="The conversation's domain.")
    messages: tuple[dict[str, Any], ...] = Field(description="Messages up to the reply, in OpenAI's form.")
    tools: list[Any] | None = Field(None, description="Tools offered to the verifier.")
    prompt_token_ids: tuple[int, ...] = Field(description="Ids of the rendered prompt, generation prompt included.")
    reference_token_ids: tuple[int, ...] | None = Field(None, description="Ids of the reply in the data.")


class Sample(StrictModel):
    """What the engine has to render to the same ids as ours."""

    row: int = Field(description="Index of the row.")
    messages: tuple[dict[str, Any], ...] = Field(description="Messages up to and with the row's last reply.")
    tools: list[Any] | None = Field(None, description="Tools offered to the verifier.")
    prompt_length: int | None = Field(description="Ids before the last reply; None: only the whole can be compared.")
    exact: bool = Field(description="Reply ids come from an engine: only the prompt can be compared.")


@dataclass(frozen=True)
class RowRecord:
    """Line of rows.jsonl; `turns` are the indices of the supervised replies in the conversation's messages."""

    id: str
    domain: str
    split: Split
    conversation: str
    turns: tuple[int, ...]


class RowWriter:
    """Collects rows in memory (5 bytes a token) and writes them at once, by rename, report last."""

    def __init__(self) -> None:
        self.input_ids, self.loss_mask, self.offsets = array("i"), array("B"), array("q", [0])
        self.records: list[RowRecord] = []

    def add(self, record: RowRecord, input_ids: Sequence[int], loss_mask: Sequence[int]) -> int:
        """Append one row and return its index."""
        self.input_ids.extend(input_ids)
        self.loss_mask.extend(loss_mask)
        self.offsets.append(len(self.input_ids))
        self.records.append(record)
        return len(self.records) - 1

    def write(
        self, output: Path, prompts: Sequence[Prompt], samples: Sequence[Sample], report: Mapping[str, Any]
    ) -> None:
        """Write all files into `output`; equal content gives equal bytes."""
        import numpy as np
        from safetensors.numpy import save_file

        output.mkdir(parents=True, exist_ok=True)
        part = output / f".{ROWS}.part"
        save_file(
            {
                "input_ids": np.frombuffer(self.input_ids, dtype=np.int32),
                "loss_mask": np.frombuffer(self.loss_mask, dtype=np.uint8),
                "offsets": np.frombuffer(self.offsets, dtype=np.int64),
                "split": np.array([SPLITS.index(record.split) for record in self.records], dtype=np.uint8),
            },
            part,
        )
        part.replace(output / ROWS)
        records = (
            {
                "id": record.id,
                "domain": record.domain,
                "split": record.split,
                "conversation": record.conversation,
                "turns": list(record.turns),
            }
            for record in self.records
        )
        _write_lines(output / RECORDS, records)
        _write_lines(output / PROMPTS, (prompt.model_dump(mode="json") for prompt in prompts))
        _write_lines(output / SAMPLES, (sample.model_dump(mode="json") for sample in samples))
        _write_text(output / REPORT, json.dumps(report, indent=2, sort_keys=True) + "\n")


class RowSet:
    """Prepared rows, memory-mapped: opening costs nothing, a row is read when asked for."""

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self.path = path
        if not (path / REPORT).is_file():
            raise DataError(f"{path} holds no prepared rows ({REPORT} is missing)", mend="run the data stage again")
        try:
            opened: Any = safe_open(path / ROWS, framework="pt")
            self._file = opened
            self._ids, self._mask = opened.get_slice("input_ids"), opened.get_slice("loss_mask")
            self._offsets: list[int] = opened.get_tensor("offsets").tolist()
            self._splits: list[int] = opened.get_tensor("split").tolist()
        except (SafetensorError, OSError) as error:
            raise DataError(f"{path / ROWS} is torn: {error}", mend="delete it and run the data stage again") from error
        self._records = [json.loads(line) for line in (path / RECORDS).read_text(encoding="utf-8").splitlines()]
        if not len(self._records) == len(self._splits) == len(self._offsets) - 1:
            raise DataError(f"{path}: {ROWS} and {RECORDS} disagree", mend="delete it and run the data stage again")

    @classmethod
    def open(cls, path: Path) -> RowSet:
        """Open what `prepare` wrote; DataError when it is missing or torn."""
        return cls(path)

    @property
    def num_rows(self) -> int:
        """Rows of both splits."""
        return len(self._records)

    @property
    def num_tokens(self) -> int:
        """Tokens of both splits."""
        return self._offsets[-1]

    @property
    def splits(self) -> list[Split]:
        """Split of each row."""
        return [SPLITS[value] for value in self._splits]

    def row(self, i: int) -> Row:
        """Row i, 0 ≤ i < num_rows; tensors of its own."""
        import torch

        if not 0 <= i < self.num_rows:
            raise IndexError(i)
        start, end, record = self._offsets[i], self._offsets[i + 1], self._records[i]
        return Row(
            index=i,
            id=record["id"],
            domain=record["domain"],
            split=SPLITS[self._splits[i]],
            input_ids=self._ids[start:end].to(torch.int64),
            loss_mask=self._mask[start:end].to(torch.bool),
        )

    def record(self, i: int) -> RowRecord:
        """Where row i comes from."""
        record = self._records[i]
        return RowRecord(
            record["id"], record["domain"], record["split"], record["conversation"], tuple(record["turns"])
        )

    def length(self, i: int) -> int:
        """Tokens of row i, without reading them."""
        return self._offsets[i + 1] - self._offsets[i]

    def indices(self, split: Split) -> list[int]:
        """Indices of the rows of a split."""
        wanted = SPLITS.index(split)
        return [i for i, value in enumerate(self._splits) if value == wanted]

    def prompts(self) -> list[Prompt]:
        """The prompts held back for evaluation."""
        return [Prompt.model_validate_json(line) for line in _lines(self.path / PROMPTS)]

    def samples(self) -> list[Sample]:
        """Rows whose messages were kept, for the comparison with the engine's rendering."""
        return [Sample.model_validate_json(line) for line in _lines(self.path / SAMPLES)]

    def report(self) -> dict[str, Any]:
        """What `prepare` read, kept and dropped."""
        report: dict[str, Any] = json.loads((self.path / REPORT).read_text(encoding="utf-8"))
        return report

    def occurrences(self, token: int) -> int:
        """How often an id stands in any row, supervised or not."""
        return int((self._file.get_tensor("input_ids") == token).sum())

    def token_counts(self, vocab_size: int, split: Split = "train") -> Tensor:
        """int64 [V]: how often each id is supervised in a split."""
        import torch

        ids = self._file.get_tensor("input_ids").to(torch.int64)
        mask = self._file.get_tensor("loss_mask").to(torch.bool)
        offsets = torch.tensor(self._offsets)
        in_split = torch.tensor(self._splits) == SPLITS.index(split)
        mask &= torch.repeat_interleave(in_split, offsets.diff())
        return torch.bincount(ids[mask], minlength=vocab_size)


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []


def _write_lines(path: Path, records: Iterator[dict[str, Any]]) -> None:
    _write_text(path, "".join(json.dumps(record, ensure_ascii=True) + "\n" for record in records))


def _write_text(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
