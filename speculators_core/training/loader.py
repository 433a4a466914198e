"""Rows of a hidden-state set as training steps, read ahead by one thread in bounded memory."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from speculators_core.data.rows import RowSet
from speculators_core.errors import DataError
from speculators_core.training.packing import Plan, clip, collate, empty_batch, plan_epoch, plan_in_order
from speculators_core.types import Aligned, Batch, Objective, Sample

log = logging.getLogger(__name__)

_LOOK_S, _LEAVE_S = 0.5, 2.0


class StateRow(Protocol):
    """One captured sequence as a state set hands it out (views of mapped memory are fine)."""

    @property
    def index(self) -> int:
        """Row of the dataset that it was captured from."""
        ...

    @property
    def split(self) -> str:
        """Either "train" or "validation"."""
        ...

    @property
    def input_ids(self) -> Tensor:
        """int64 [T]."""
        ...

    @property
    def loss_mask(self) -> Tensor:
        """bool [T]."""
        ...

    @property
    def hidden_states(self) -> Tensor:
        """[T, K, H] in the captured dtype."""
        ...


class States(Protocol):
    """What training needs of a hidden-state set. Rows are read from the loader's thread and from the main one."""

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens of each row, by position, without touching the states."""
        ...

    @property
    def splits(self) -> Sequence[str]:
        """Split of each row, by position."""
        ...

    def row(self, position: int) -> StateRow:
        """The row at `position`."""
        ...

    def expecting(self, positions: Iterable[int]) -> AbstractContextManager[None]:
        """Entered around reading these rows, each once, in this order: a set that fetches may fetch them ahead."""
        ...


class SomeLayers:
    """A set of which only some layers are handed out: one capture serves every algorithm whose layers it holds."""

    def __init__(self, states: States, places: Sequence[int]) -> None:
        self.lengths, self.splits = states.lengths, states.splits
        self._states = states
        self._places = list(places)

    def row(self, position: int) -> StateRow:
        """The row with the chosen layers (a copy of them)."""
        row = self._states.row(position)
        return _Row(row.index, row.split, row.input_ids, row.loss_mask, row.hidden_states[:, self._places])

    def expecting(self, positions: Iterable[int]) -> AbstractContextManager[None]:
        """As the whole set's."""
        return self._states.expecting(positions)


class Uncaptured:
    """Prepared rows as a set whose states have no width: enough to count what would be learned from them."""

    def __init__(self, rows: RowSet) -> None:
        self.lengths, self.splits = [rows.length(number) for number in range(rows.num_rows)], rows.splits
        self._rows = rows

    def row(self, position: int) -> StateRow:
        """The row, with a layer that is read and the last one."""
        row = self._rows.row(position)
        return _Row(row.index, row.split, row.input_ids, row.loss_mask, torch.empty(row.input_ids.numel(), 2, 0))

    def expecting(self, positions: Iterable[int]) -> AbstractContextManager[None]:
        """Nothing is fetched."""
        return nullcontext()


@dataclass(frozen=True)
class _Row:
    index: int
    split: str
    input_ids: Tensor
    loss_mask: Tensor
    hidden_states: Tensor


@dataclass(frozen=True)
class StepBatches:
    """One rank's share of an optimiser step.

    batches      as many on every rank: a rank without a row left has a batch of padding
    supervised   whether a batch has anything to learn; padding has not
    rows         positions in the set of each batch's documents
    denominators float64 [terms], this rank's sum over its batches
    """

    batches: tuple[Batch, ...]
    supervised: tuple[bool, ...]
    rows: tuple[tuple[int, ...], ...]
    denominators: Tensor


class PackedRows:
    """The rows of one split, aligned and packed.

    `shift` tokens at a row's ends are lost by the objective's alignment; a row keeps at most capacity + shift tokens,
    so that exactly `capacity` remain. Features are handed out in `dtype`, that of the forward pass.
    """

    def __init__(
        self,
        states: States,
        objective: Objective,
        split: str,
        capacity: int,
        *,
        dtype: torch.dtype = torch.float32,
        limit: int | None = None,
    ) -> None:
        found = [position for position, name in enumerate(states.splits) if name == split]
        self.positions: tuple[int, ...] = tuple(found if limit is None else found[:limit])
        if not self.positions:
            raise DataError(
                f"the hidden-state set has no {split} row",
                mend="capture more rows, or change data.validation_share so that both splits get some",
            )
        self.states = states
        self.objective = objective
        self.capacity = capacity
        self.dtype = dtype
        probe = _sample(states.row(self.positions[0]), None)
        self.shift = probe.input_ids.shape[0] - objective.align(probe).input_ids.shape[0]
        lengths = states.lengths
        self.lengths: tuple[int, ...] = tuple(max(0, lengths[position] - self.shift) for position in self.positions)

    def aligned(self, index: int) -> Aligned:
        """Row `index` of this split, clipped and aligned."""
        row = self.states.row(self.positions[index])
        aligned = self.objective.align(_sample(row, self.capacity + self.shift))
        return replace(aligned, aux_TAH=aligned.aux_TAH.to(self.dtype), last_TH=aligned.last_TH.to(self.dtype))

    def expecting(self, rows: Iterable[int]) -> AbstractContextManager[None]:
        """Entered around reading these rows of the split, in this order."""
        return self.states.expecting(self.positions[row] for row in rows)

    def batch(self, rows: Sequence[int]) -> Batch:
        """These rows of the split packed into one batch on the CPU."""
        return collate([self.aligned(row) for row in rows], self.capacity)

    @cached_property
    def blank(self) -> Batch:
        """A batch of padding with this set's widths and dtype."""
        first = self.aligned(0)
        return empty_batch(self.capacity, first.aux_TAH.shape[-1], first.last_TH.shape[-1], first.last_TH.dtype)

    def epoch_plan(self, seed: int, epoch: int) -> Plan:
        """The packed rows of one epoch, shuffled by (seed, epoch)."""
        return plan_epoch(self.lengths, self.capacity, seed=seed, epoch=epoch)

    def fixed_plan(self) -> Plan:
        """The packed rows in an order that never changes."""
        return plan_in_order(self.lengths, self.capacity)


class StepLoader:
    """Optimiser steps of one epoch for one rank.

    A step takes `accumulation · world_size` packed rows of the plan; this rank gets every world_size-th of them. The
    last step of an epoch may be smaller; nothing is left out. Memory: `prefetch + 2` steps' batches.
    """

    def __init__(self, rows: PackedRows, *, accumulation: int, rank: int, world_size: int, prefetch: int) -> None:
        self.rows = rows
        self.rank = rank
        self.world_size = world_size
        self.per_step = accumulation * world_size
        self.prefetch = prefetch

    def num_steps(self, plan: Plan) -> int:
        """Optimiser steps of an epoch with this plan."""
        return -(-len(plan.rows) // self.per_step)

    def load(self, plan: Plan, step: int) -> StepBatches:
        """This rank's batches of step `step` of the epoch."""
        of_step = self._of_step(plan, step)
        mine = of_step[self.rank :: self.world_size]
        fillers = -(-len(of_step) // self.world_size) - len(mine)
        batches = [self.rows.batch(rows) for rows in mine] + [self.rows.blank] * fillers
        counts = [self.rows.objective.denominators(batch).to("cpu", torch.float64) for batch in batches]
        supervised = tuple(bool(count.any()) for count in counts)
        return StepBatches(tuple(batches), supervised, mine, torch.stack(counts).sum(dim=0))

    def steps(self, plan: Plan, start: int = 0, waiting: Callable[[], None] = lambda: None) -> Generator[StepBatches]:
        """Steps from `start` on, read ahead by a thread that ends with the iterator.

        `waiting` is called now and then while one is waited for; what it raises ends the wait.
        """
        jobs = range(start, self.num_steps(plan))
        order = (
            row for step in jobs for rows in self._of_step(plan, step)[self.rank :: self.world_size] for row in rows
        )
        with self.rows.expecting(order):
            yield from _ahead(lambda step: self.load(plan, step), jobs, self.prefetch, waiting)

    def _of_step(self, plan: Plan, step: int) -> tuple[tuple[int, ...], ...]:
        """The packed rows that all ranks share in a step."""
        return plan.rows[step * self.per_step : (step + 1) * self.per_step]


def _ahead(
    make: Callable[[int], StepBatches], jobs: Sequence[int], depth: int, waiting: Callable[[], None]
) -> Generator[StepBatches]:
    """make(job) for each job, in order, computed up to `depth` ahead in a thread. An error surfaces at its place."""
    ready: queue.Queue[StepBatches | BaseException] = queue.Queue(depth)
    stopped = threading.Event()

    def put(item: StepBatches | BaseException) -> None:
        while not stopped.is_set():
            try:
                ready.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    def work() -> None:
        for job in jobs:
            if stopped.is_set():
                return
            try:
                put(make(job))
            except BaseException as error:  # noqa: BLE001 — handed over and raised by the consumer
                put(error)
                return

    def take() -> StepBatches | BaseException:
        while True:
            try:
                return ready.get(timeout=_LOOK_S)
            except queue.Empty:
                waiting()

    thread = threading.Thread(target=work, name="step-loader", daemon=True)
    thread.start()
    try:
        for _ in jobs:
            item = take()
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stopped.set()
        thread.join(_LEAVE_S)  # one that waits for states which may never come ends when their stream is closed


def _sample(row: StateRow, limit: int | None) -> Sample:
    length = row.input_ids.shape[0] if limit is None else min(limit, row.input_ids.shape[0])
    return Sample(
        input_ids=clip(row.input_ids, length),
        loss_mask=clip(row.loss_mask, length),
        hidden_states=clip(row.hidden_states, length),
        position_ids=torch.arange(length, dtype=torch.int64),
        row=row.index,
    )
