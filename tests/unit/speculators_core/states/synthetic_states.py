"""Synthetic token rows and records for the tests of this folder."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from hs_connectors.contract import Record
from speculators_core.states.shards import StatesFacts

FACTS = StatesFacts(
    layer_ids=(1, 2, 4), hidden_size=8, dtype="bfloat16", verifier_fingerprint="f" * 64, source="engine"
)


@dataclass(frozen=True)
class TokenRow:
    index: int
    split: str
    input_ids: Tensor
    loss_mask: Tensor


@dataclass(frozen=True)
class ListOfRows:
    content: list[TokenRow] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return len(self.content)

    def row(self, index: int, /) -> TokenRow:
        return self.content[index]


def make_rows(lengths: list[int], vocab: int = 64) -> ListOfRows:
    generator = torch.Generator().manual_seed(3)
    return ListOfRows(
        [
            TokenRow(
                number,
                "validation" if number % 4 == 3 else "train",
                torch.randint(0, vocab, (length,), generator=generator, dtype=torch.int32),
                (torch.arange(length) >= length // 2).to(torch.uint8),
            )
            for number, length in enumerate(lengths)
        ]
    )


def states_for(row: TokenRow, facts: StatesFacts = FACTS) -> Tensor:
    shape = (len(row.input_ids), len(facts.layer_ids), facts.hidden_size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(row.index)).to(getattr(torch, facts.dtype))


def record_for(row: TokenRow, facts: StatesFacts = FACTS) -> Record:
    return Record(
        hidden_states=states_for(row, facts),
        token_ids=row.input_ids.to(torch.int64),
        layer_ids=facts.layer_ids,
        dtype=facts.dtype,
        verifier_fingerprint=facts.verifier_fingerprint,
    )
