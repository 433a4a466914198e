"""The reference loop's verifier: transformers' own model, with the states that drafts read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speculators_core.states.hf import StateCatcher, load_verifier


class ReferenceVerifier:
    """One sequence at a time: `begin`, then `feed` what is new, and `keep` what of it was accepted.

    Args:
        layer_ids: whose states are wanted, ascending.
        dtype: torch name; the forward runs in it.

    Raises:
        VerifierError: transformers cannot load the directory.
    """

    def __init__(
        self, verifier_dir: Path, layer_ids: Sequence[int], dtype: str, *, trust_remote_code: bool = False
    ) -> None:
        self._model = load_verifier(verifier_dir, dtype, trust_remote_code=trust_remote_code)
        self._catcher = StateCatcher(self._model, layer_ids)
        self._tokens: list[int] = []
        self._cache: Any = None

    def begin(self) -> None:
        """Forget everything."""
        from transformers.cache_utils import DynamicCache, DynamicLayer

        cache = DynamicCache(config=self._model.config)
        # recurrent states and sliding windows cannot take tokens back: without a cache all is computed anew
        self._cache = cache if all(type(layer) is DynamicLayer for layer in cache.layers) else None
        self._tokens = []

    @torch.inference_mode()
    def feed(self, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Go on with these tokens: float32 logits [N, V] behind each of them, and states [N, K, H]."""
        self._tokens += tokens
        fed = self._tokens if self._cache is None else list(tokens)
        output = self._model(
            input_ids=torch.tensor([fed]), past_key_values=self._cache, use_cache=self._cache is not None
        )
        count = len(tokens)
        return output.logits[0, -count:].float(), self._catcher.take()[-count:]

    def keep(self, length: int) -> None:
        """Forget all tokens beyond the first `length`."""
        surplus = len(self._tokens) - length
        if surplus > 0:
            del self._tokens[length:]
            if self._cache is not None:
                self._cache.crop(-surplus)
