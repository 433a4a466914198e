"""The largest of many logits, and where it is."""

from __future__ import annotations

from torch import Tensor

RUN = 128
"""Logits of a run, see `best_index`."""


def best_index(logits: Tensor) -> Tensor:
    """`logits.argmax(-1)`, the first one on ties.

    On a CPU it takes five times as long to find where the largest is as how large it is. So the largest of each run is
    found first, then the run, then the place in it; where the vocabulary is no whole number of runs, plainly.
    """
    if logits.shape[-1] % RUN or not logits.numel():
        return logits.argmax(dim=-1)
    runs = logits.reshape(*logits.shape[:-1], -1, RUN)
    run = runs.amax(dim=-1).argmax(dim=-1)
    place: Tensor = runs.take_along_dim(run[..., None, None], dim=-2).squeeze(-2).argmax(dim=-1)
    return run * RUN + place
