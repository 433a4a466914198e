"""How hidden states become tensors of a payload, and back; composes with any backend.

A codec that is added to `CODECS` is at once available to every backend: its name travels in
the payload's metadata, so readers need no configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from hs_connectors.errors import RecordError, UnknownName

if TYPE_CHECKING:
    import torch


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


CODECS: Mapping[str, Codec] = MappingProxyType({"none": Plain()})


def find_codec(name: str) -> Codec:
    """The codec of that name; UnknownName lists those that exist."""
    try:
        return CODECS[name]
    except KeyError:
        raise UnknownName(f"unknown codec {name!r}", mend=f"use one of {', '.join(sorted(CODECS))}") from None
