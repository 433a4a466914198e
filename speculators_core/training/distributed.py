"""The ranks of a data-parallel run: who I am, and sums over all. One process is the case size == 1."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, distributed

from speculators_core import errors
from speculators_core.errors import ConfigError, DraftsmithError
from speculators_core.types import Counted

Part = TypeVar("Part")


@dataclass(frozen=True)
class World:
    """This process among its peers.

    Every method that talks to the others must be called by all ranks, in the same order.
    """

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """True on the one rank that writes files."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Elementwise sum over ranks of a float64 tensor on the CPU; a collective when size > 1."""
        if self.size == 1:
            return values
        moved = values.to(self.device) if distributed.get_backend() == "nccl" else values.clone()
        distributed.all_reduce(moved)
        return moved.cpu()

    def pool(self, metrics: Mapping[str, Counted]) -> dict[str, Counted]:
        """Pool counted metrics over ranks. Ranks may hold different names: their union comes back, sorted."""
        pooled: dict[str, Counted] = {}
        for part in self.gather({name: [value.sum, value.count] for name, value in metrics.items()}):
            for name, (total, count) in part.items():
                pooled[name] = pooled.get(name, Counted(0.0, 0.0)) + Counted(total, count)
        return dict(sorted(pooled.items()))

    def gather(self, value: Any) -> list[Any]:
        """Every rank's JSON value, by rank. A collective when size > 1; nothing is pickled."""
        if self.size == 1:
            return [value]
        device = self.device if distributed.get_backend() == "nccl" else torch.device("cpu")
        mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
        lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(self.size)]
        distributed.all_gather(lengths, torch.tensor([len(mine)], device=device))
        longest = int(max(int(length) for length in lengths))
        parts = [torch.zeros(longest, dtype=torch.uint8, device=device) for _ in range(self.size)]
        distributed.all_gather(parts, torch.nn.functional.pad(mine, (0, longest - len(mine))))
        return [
            json.loads(bytes(part[: int(length)].cpu().numpy())) for part, length in zip(parts, lengths, strict=True)
        ]

    @contextmanager
    def one_fate(self) -> Iterator[None]:
        """Around work that each rank does by itself: an error of one is raised on all of them. A collective at its end.

        Without it the others would wait in their next collective until the launcher ends them, and forget the cause.
        """
        if self.size == 1:
            yield
            return
        mine: DraftsmithError | None = None
        try:
            yield
        except DraftsmithError as error:
            mine = error
        if not self.sum(torch.tensor([mine is not None], dtype=torch.float64))[0]:
            return
        told = self.gather(None if mine is None else [type(mine).__name__, mine.what, mine.mend])
        rank, (name, what, mend) = next((rank, cause) for rank, cause in enumerate(told) if cause is not None)
        kind: type[DraftsmithError] = getattr(errors, name, DraftsmithError)
        raise kind(f"rank {rank}: {what}", mend=mend) from mine

    def together(self, parts: Generator[Part]) -> Iterator[Part]:
        """The same parts, of which every rank has as many: where making one fails, it fails on all ranks."""
        with closing(parts):
            ended = False
            while not ended:
                with self.one_fate():
                    ended, found = _next(parts)
                yield from found

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.size > 1:
            distributed.barrier()


def _next(parts: Iterator[Part]) -> tuple[bool, tuple[Part, ...]]:
    """Whether there are no more, and the next one if there is."""
    for part in parts:
        return False, (part,)
    return True, ()


def choose_device(device: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """The device to train on; ConfigError when cuda was asked for and is not there."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("training.device is cuda, but torch sees no CUDA device", mend="set it to auto or cpu")
    if device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


@contextmanager
def join(device: Literal["auto", "cpu", "cuda"], *, timeout_s: float = 1800) -> Iterator[World]:
    """Join the process group that torchrun's environment describes, and leave it at the end.

    Without that environment there is one rank and no process group. The group is not torn down by a collective: a rank
    that fails leaves at once.
    """
    chosen = choose_device(device)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield World(0, 1, chosen)
        return
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    distributed.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    try:
        yield World(distributed.get_rank(), size, chosen)
    finally:
        distributed.destroy_process_group()
