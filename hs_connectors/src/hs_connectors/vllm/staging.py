"""Copies of hidden states out of the engine's cache: plain on the CPU, asynchronous on a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hs_connectors.vllm.plugin import PROCESSORS

_CHUNK_BYTES = 64 << 20
"""Device memory that one gather may take: what a long row needs beyond it is copied piece by piece."""


@dataclass(frozen=True)
class Copy:
    """A copy on its way.

    states [T, K, H] on the host; valid once `wait` has returned · done: whether the source blocks may be reused.
    """

    states: torch.Tensor
    done: Callable[[], bool]
    wait: Callable[[], None]


class Stager:
    """Copies rows of a paged cache [blocks, K, block size, H] to host memory."""

    def __init__(self, cache: torch.Tensor) -> None:
        self._pages = cache.transpose(1, 2)  # [blocks, block size, K, H]
        self._stream: Any = None
        if cache.device.type != "cpu":
            self._stream = torch.cuda.Stream(cache.device)  # type: ignore[no-untyped-call]

    @property
    def dtype(self) -> torch.dtype:
        """Of the states as the engine keeps them."""
        return self._pages.dtype

    def num_bytes(self, num_tokens: int) -> int:
        """Host memory that a copy of so many tokens takes."""
        return num_tokens * self._pages[0, 0].numel() * self._pages.element_size()

    def copy(self, blocks: Sequence[int], num_tokens: int) -> Copy:
        """Start copying the first `num_tokens` tokens that lie in these blocks."""
        if self._stream is None:
            pages = self._pages.index_select(0, torch.tensor(blocks, dtype=torch.int64))
            return Copy(pages.flatten(0, 1)[:num_tokens], done=lambda: True, wait=lambda: None)
        return self._copy_from_device(blocks, num_tokens)

    def _copy_from_device(self, blocks: Sequence[int], num_tokens: int) -> Copy:
        pages, size = self._pages, self._pages.shape[1]
        host = torch.empty((num_tokens, *pages.shape[2:]), dtype=pages.dtype, pin_memory=True)
        index = torch.tensor(blocks, dtype=torch.int64, pin_memory=True)
        step = max(1, _CHUNK_BYTES // max(1, self.num_bytes(size)))
        self._stream.wait_stream(torch.cuda.current_stream(pages.device))  # the forward passes that filled the blocks
        with torch.cuda.stream(self._stream):
            on_device = index.to(pages.device, non_blocking=True)
            for first in range(0, len(blocks), step):
                rows = pages.index_select(0, on_device[first : first + step]).flatten(0, 1)
                target = host[first * size : (first + step) * size]
                target.copy_(rows[: len(target)], non_blocking=True)
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return Copy(host, done=event.query, wait=event.synchronize)


def run_anywhere() -> None:
    """Let the calling thread use all our processors: on the CPU build it inherits the one that its engine runs on."""
    if PROCESSORS:
        os.sched_setaffinity(0, PROCESSORS)
