"""A head's tensors between their names here, in the verifier's checkpoint, and in a checkpoint of their own."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from speculators_core.algorithms.mtp.config import MTPConfig
from speculators_core.algorithms.mtp.families import Family
from speculators_core.errors import VerifierError
from speculators_core.formats.native_head import JOINTS, PREFIX
from speculators_core.verifier.weights import locate

GATE_UP, DOWN = "layer.mlp.experts.gate_up_proj", "layer.mlp.experts.down_proj"
"""Experts as the library stacks them: [E, 2·I, H], gate rows first, and [E, H, I]."""


def read_native(verifier_dir: Path, family: Family, depth: int, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The verifier's own values for our names, in the dtypes that they are wanted in.

    Raises:
        VerifierError: a tensor is missing, quantised, or of another shape.
    """
    from safetensors import safe_open

    located = locate(verifier_dir)

    def stored(name: str) -> Tensor:
        if name not in located:
            raise VerifierError(
                f"{verifier_dir} has no tensor {name}: its native head is not there, or not as {family.name} names it",
                mend="use a checkpoint that carries its multi-token head; many conversions leave it out",
            )
        with safe_open(located[name], framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise VerifierError(f"{name} is stored as {tensor.dtype}: a quantised head cannot be trained")
        return tensor

    found: dict[str, Tensor] = {}
    for name, like in wanted.items():
        single = family.native_name(name, depth)
        if single not in located and name in (GATE_UP, DOWN):
            tensor = torch.stack(
                [torch.cat([stored(part) for part in parts]) for parts in _experts(name, family, depth, like.shape[0])]
            )
        else:
            tensor = stored(single)
        if tensor.shape != like.shape:
            raise VerifierError(f"{single} has shape {list(tensor.shape)}; config.json implies {list(like.shape)}")
        found[name] = tensor.to(like.dtype)
    return found


def to_native(tensors: Mapping[str, Tensor], family: Family, depth: int, located: Collection[str]) -> dict[str, Tensor]:
    """Our tensors under the verifier's names; stacked experts are taken apart where the verifier keeps them apart."""
    native: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        single = family.native_name(name, depth)
        if single in located or name not in (GATE_UP, DOWN):
            native[single] = tensor
            continue
        for parts, expert in zip(_experts(name, family, depth, tensor.shape[0]), tensor, strict=True):
            native |= dict(zip(parts, expert.chunk(len(parts)), strict=True))
    return native


def _experts(name: str, family: Family, depth: int, count: int) -> list[list[str]]:
    """Names of each expert's matrices in the verifier."""
    kinds = ("gate_proj", "up_proj") if name == GATE_UP else ("down_proj",)
    stem = family.native_name(name, depth).rsplit(".", 1)[0]
    return [[f"{stem}.{number}.{kind}.weight" for kind in kinds] for number in range(count)]


def to_checkpoint(name: str) -> str:
    """Our name in a checkpoint of the head alone."""
    return PREFIX + name.removeprefix("layer.")


def from_checkpoint(name: str) -> str:
    """The other way."""
    bare = name.removeprefix(PREFIX)
    return bare if bare.split(".")[0] in JOINTS else f"layer.{bare}"


def own_names(config: MTPConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A checkpoint's tensors by our names."""
    return {from_checkpoint(name): tensor for name, tensor in tensors.items()}
