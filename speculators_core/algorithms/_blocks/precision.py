"""Autocast must not reach into functions that choose their own precision."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def as_written(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function in exactly the dtypes that it writes down.

    Under autocast even a dot product of two float32 tensors is formed in bfloat16, which would round norms and
    log-sum-exps.
    """

    @functools.wraps(function)
    def plain(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return function(*args, **kwargs)

    return plain
