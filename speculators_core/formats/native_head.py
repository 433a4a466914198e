"""A verifier's own multi-token head as a checkpoint of its own: names, and what can be wrong without the verifier."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

PREFIX = "mtp_layers.0."
"""What every tensor name begins with."""
JOINTS = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
"""What a head has beside its decoder layer: norms of both inputs, their projection, the last norm."""


def check_native_head(tensors: Mapping[str, Tensor], problems: list[str]) -> None:
    """Names, dtypes and values; shapes are the affair of the verifier that the head is stitched into."""
    import torch

    wanted = [f"{PREFIX}{joint}.weight" for joint in JOINTS]
    problems += [f"{name} is missing" for name in wanted if name not in tensors]
    for name, tensor in tensors.items():
        if not name.startswith(PREFIX):
            problems.append(f"{name} is no part of a native head")
        elif tensor.dtype != torch.bfloat16:
            problems.append(f"{name} is {tensor.dtype}, not bfloat16")
        elif not bool(torch.isfinite(tensor).all()):
            problems.append(f"{name} holds values that are not finite")
