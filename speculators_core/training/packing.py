"""Which rows share a packed row, and how they become a batch. Pure functions; nothing is dropped in silence."""

from __future__ import annotations

import bisect
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from speculators_core.types import Aligned, Batch

WINDOW = 1024
"""Rows packed together: large enough to fill well, small enough that epochs mix rows differently."""


@dataclass(frozen=True)
class Plan:
    """Order of one epoch.

    rows    indices of the rows that each packed row holds, in order
    clipped rows longer than the capacity (they are cut to it)
    tokens  tokens in the packed rows, padding excluded
    """

    rows: tuple[tuple[int, ...], ...]
    clipped: int
    tokens: int

    def fill(self, capacity: int) -> float:
        """Share of the packed rows that is not padding."""
        return self.tokens / (len(self.rows) * capacity) if self.rows else 0.0


def plan_epoch(lengths: Sequence[int], capacity: int, *, seed: int, epoch: int) -> Plan:
    """Pack rows of `lengths` tokens into packed rows of `capacity` tokens for one epoch.

    A permutation drawn from (seed, epoch) is cut into windows; each is packed best-fit, longest first, and the packed
    rows are shuffled. The same arguments give the same plan on every machine. Every row is in exactly one packed row.
    """
    draws = random.Random(f"{seed}/{epoch}")  # a text seed is hashed the same way in every version of Python
    order = list(range(len(lengths)))
    draws.shuffle(order)
    bins: list[tuple[int, ...]] = []
    for start in range(0, len(order), WINDOW):
        bins.extend(_best_fit(order[start : start + WINDOW], lengths, capacity))
    draws.shuffle(bins)
    tokens = sum(min(length, capacity) for length in lengths)
    return Plan(tuple(bins), sum(length > capacity for length in lengths), tokens)


def plan_in_order(lengths: Sequence[int], capacity: int) -> Plan:
    """Pack best-fit without any shuffle: validation, whose batches never change."""
    bins = _best_fit(list(range(len(lengths))), lengths, capacity)
    tokens = sum(min(length, capacity) for length in lengths)
    return Plan(tuple(bins), sum(length > capacity for length in lengths), tokens)


def _best_fit(rows: Sequence[int], lengths: Sequence[int], capacity: int) -> list[tuple[int, ...]]:
    """Longest row first, each into the fullest bin that still holds it."""
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (room left, bin), ascending
    for row in sorted(rows, key=lambda index: -lengths[index]):  # stable: ties keep the drawn order
        length = min(lengths[row], capacity)
        at = bisect.bisect_left(free, (length, -1))
        if at == len(free):
            bins.append([row])
            room, bin_index = capacity - length, len(bins) - 1
        else:
            room, bin_index = free.pop(at)
            bins[bin_index].append(row)
            room -= length
        if room:
            bisect.insort(free, (room, bin_index))
    return [tuple(content) for content in bins]


def collate(documents: Sequence[Aligned], capacity: int) -> Batch:
    """Lay aligned documents one after the other into one batch of `capacity` tokens.

    input_ids, position_ids, document_ids int64 [T], loss_mask bool [T], aux_TAH [T, A·H] and last_TH [T, H] in the
    documents' dtype. Padding has document −1, mask False and zero features. The caller has clipped what is too long.
    """
    first = documents[0]
    batch = empty_batch(capacity, first.aux_TAH.shape[-1], first.last_TH.shape[-1], first.last_TH.dtype)
    start = 0
    for number, document in enumerate(documents):
        end = start + document.input_ids.shape[0]
        assert end <= capacity, f"packed {end} tokens into a row of {capacity}"
        batch.input_ids[start:end] = document.input_ids
        batch.loss_mask[start:end] = document.loss_mask
        batch.position_ids[start:end] = document.position_ids
        batch.document_ids[start:end] = number
        batch.aux_TAH[start:end] = document.aux_TAH
        batch.last_TH[start:end] = document.last_TH
        start = end
    return batch


def empty_batch(capacity: int, aux_width: int, hidden_size: int, dtype: torch.dtype) -> Batch:
    """A batch of padding alone: what a data-parallel rank runs when a step has no row left for it."""
    return Batch(
        input_ids=torch.zeros(capacity, dtype=torch.int64),
        loss_mask=torch.zeros(capacity, dtype=torch.bool),
        position_ids=torch.zeros(capacity, dtype=torch.int64),
        document_ids=torch.full((capacity,), -1, dtype=torch.int64),
        aux_TAH=torch.zeros(capacity, aux_width, dtype=dtype),
        last_TH=torch.zeros(capacity, hidden_size, dtype=dtype),
    )


def clip(tensor: Tensor, tokens: int) -> Tensor:
    """The first `tokens` entries along dimension 0: a view."""
    return tensor[:tokens]


def num_tokens(batch: Batch) -> int:
    """Tokens that are not padding."""
    return int((batch.document_ids >= 0).sum())


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on `device` (itself when it is there already)."""
    return Batch(**{name: value.to(device, non_blocking=True) for name, value in batch_tensors(batch).items()})


def batch_tensors(batch: Batch) -> dict[str, Tensor]:
    """The batch's tensors by field name, to move them or to save them."""
    return {
        "input_ids": batch.input_ids,
        "loss_mask": batch.loss_mask,
        "position_ids": batch.position_ids,
        "document_ids": batch.document_ids,
        "aux_TAH": batch.aux_TAH,
        "last_TH": batch.last_TH,
    }
