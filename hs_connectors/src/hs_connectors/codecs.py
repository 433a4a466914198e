"""How hidden states become tensors of a payload, and back; composes with any backend.

A codec that is added to `CODECS` is at once available to every backend: its name travels in
the payload's metadata, so readers need no configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import torch

from hs_connectors.errors import RecordError, RecordNotFinite, UnknownName

_LARGEST_FP8 = 448.0
"""Largest finite value of float8_e4m3fn: 0.875 · 2^9."""
_LEAST_EXPONENT = -126
"""Of the smallest normal float32: no scale goes below, so that its inverse is finite as well."""
_FLOAT32_BIAS, _FLOAT32_MANTISSA_BITS = 127, 23


class Codec(Protocol):
    """A pair of pure functions between hidden states [T, K, H] and the tensors that are stored."""

    def encode(self, hidden_states: torch.Tensor) -> dict[str, torch.Tensor]:
        """Named tensors, contiguous and on the CPU; names other than `token_ids`."""
        ...

    def decode(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Hidden states [T, K, H] in `dtype`; RecordError when a tensor is missing."""
        ...


class Plain:
    """`none`: the states as they are."""

    def encode(self, hidden_states: torch.Tensor) -> dict[str, torch.Tensor]:
        """One tensor, `hidden_states`."""
        return {"hidden_states": hidden_states.contiguous()}

    def decode(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """The same tensor; RecordError when its dtype is not the one that the record names."""
        states = tensors.get("hidden_states")
        if states is None or states.dtype != dtype:
            raise RecordError(f"record without hidden_states in {dtype}; it holds {sorted(tensors)}")
        return states


class Fp8:
    """`fp8`: float8_e4m3fn with one scale for each token and layer; half the bytes of bfloat16.

    A scale is the least power of two by which the row's largest magnitude fits. Scaling by powers of two is exact, so
    that 3 bits of mantissa are all that is lost (at most 1/16 of a value; far below the row's largest, 2^-10 · scale),
    and states that went through the codec once come back bit for bit ever after.
    """

    def encode(self, hidden_states: torch.Tensor) -> dict[str, torch.Tensor]:
        """`hidden_states` float8_e4m3fn [T, K, H], `scales` float32 [T, K, 1]; RecordNotFinite for NaN or infinity."""
        states_TKH = hidden_states if hidden_states.dtype == torch.bfloat16 else hidden_states.float()
        largest_TK1 = states_TKH.abs().amax(-1, keepdim=True).float()
        if not bool(torch.isfinite(largest_TK1).all()):
            raise RecordNotFinite("hidden states hold NaN or infinity, for which fp8 has no scale")
        mantissa, exponent = torch.frexp(largest_TK1)  # mantissa in [0.5, 1), or 0
        exponent = (exponent - 9 + (mantissa > _LARGEST_FP8 / 512)).clamp_(min=_LEAST_EXPONENT)
        scaled_TKH = states_TKH * _power_of_two(-exponent).to(states_TKH.dtype)
        return {"hidden_states": scaled_TKH.to(torch.float8_e4m3fn), "scales": _power_of_two(exponent)}

    def decode(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """States in `dtype`: exact, but for magnitudes that were rounded beyond its range, which end at its largest."""
        states, scales = tensors.get("hidden_states"), tensors.get("scales")
        if states is None or scales is None or states.dtype != torch.float8_e4m3fn:
            raise RecordError(f"fp8 record without float8 hidden_states and scales; it holds {sorted(tensors)}")
        wide = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        largest = torch.finfo(dtype).max
        decoded_TKH = states.to(wide).mul_(scales.to(wide)).clamp_(-largest, largest)
        return decoded_TKH.to(dtype)


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2 ** exponent as float32, exactly; int32 within -126 … 127."""
    return ((exponent + _FLOAT32_BIAS) << _FLOAT32_MANTISSA_BITS).view(torch.float32)


CODECS: Mapping[str, Codec] = MappingProxyType({"none": Plain(), "fp8": Fp8()})


def find_codec(name: str) -> Codec:
    """The codec of that name; UnknownName lists those that exist."""
    try:
        return CODECS[name]
    except KeyError:
        raise UnknownName(f"unknown codec {name!r}", mend=f"use one of {', '.join(sorted(CODECS))}") from None
