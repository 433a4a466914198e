"""Captured states against an independent computation of the same model (decision 14 of the design).

On sampled rows: the cosine with a Hugging Face forward, or, where the verifier is too large to load, whether
head(norm(last state)) gives the engine's next token.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from pydantic import Field
from torch import Tensor

from speculators_core.errors import CaptureError, VerifierError
from speculators_core.states.collect import Collector, Rows, ids_of
from speculators_core.states.config import CaptureConfig
from speculators_core.states.sets import StateSet
from speculators_core.types import StrictModel
from speculators_core.verifier.facts import VerifierFacts

logger = logging.getLogger(__name__)


class LayerParity(StrictModel):
    """Agreement of one captured layer with the reference."""

    layer: int = Field(description="layer id")
    cosine: float = Field(description="least, over the rows, of the mean cosine over tokens")
    worst_token: float = Field(description="least cosine of any token")


class ParityReport(StrictModel):
    """Captured states against an independent forward on sampled rows."""

    method: str = Field(description="hf: cosine with a Hugging Face forward; argmax: next tokens of the engine")
    rows: tuple[int, ...] = Field(description="dataset indices of the compared rows")
    tokens: int = Field(ge=0, description="tokens compared")
    layers: tuple[LayerParity, ...] = Field(default=(), description="by layer; empty for argmax")
    agreement: float | None = Field(None, description="argmax: share of rows whose next token agrees")


class ParityGate:
    """Sampled rows and their reference states: checked once when they arrive, and again in the finished shards."""

    def __init__(
        self,
        rows: Rows,
        collector: Collector,
        config: CaptureConfig,
        verifier_dir: Path,
        facts: VerifierFacts,
        trust_remote_code: bool,
    ) -> None:
        self._rows, self._collector, self._config = rows, collector, config
        self._verifier_dir, self._facts, self._trust = verifier_dir, facts, trust_remote_code
        count = min(config.parity_rows, rows.num_rows)
        self.positions = sorted(random.Random(0).sample(range(rows.num_rows), count))
        self._reference: dict[int, Tensor] = {}
        self._next_tokens: dict[int, bool] = {}
        self._by_argmax = False

    def prepare(self) -> None:
        """Run the reference forward (or decide that the verifier is too large for it)."""
        from speculators_core.states.hf import reference_dtype, reference_states

        if not self.positions:
            return
        dtype = reference_dtype(self._verifier_dir, self._config.parity_memory_gib)
        if dtype is None:
            logger.info("the verifier is too large for a reference forward: next tokens are compared instead")
            self._by_argmax = True
            return
        started = time.monotonic()
        sampled = [self._rows.row(position) for position in self.positions]
        try:
            self._reference = reference_states(
                self._verifier_dir,
                [(row.index, ids_of(row)[: self._config.parity_tokens]) for row in sampled],
                self._collector.facts.layer_ids,
                dtype,
                trust_remote_code=self._trust,
            )
        except VerifierError as error:  # a family that only vLLM knows
            logger.warning("no reference forward: %s; next tokens are compared instead", error.what)
            self._by_argmax = True
            return
        logger.info("reference states of %d rows in %s took %.1f s", len(sampled), dtype, time.monotonic() - started)

    def offer(self, index: int, states: Tensor, next_token: int | None) -> None:
        """Look at a row that was just captured; CaptureError as soon as a sampled one disagrees."""
        if self._by_argmax and next_token is not None and len(self._next_tokens) < len(self.positions):
            self._next_tokens[index] = self._head_agrees(states[-1, -1], next_token)
            agreement = sum(self._next_tokens.values()) / len(self._next_tokens)
            if len(self._next_tokens) == len(self.positions) and agreement < _LEAST_AGREEMENT:
                raise CaptureError(
                    f"the last hidden states give the engine's next token in only {agreement:.0%} of "
                    f"{len(self._next_tokens)} rows",
                    mend="engine and verifier directory differ, or the last layer was taken after its norm",
                )
        expected = self._reference.get(index)
        if expected is not None:
            self._compare({index: states}, {index: expected})

    def conclude(self, captured: StateSet) -> ParityReport | None:
        """Compare the finished shards once more; the report that goes into the set."""
        if self._reference:
            places = {index: place for place, index in enumerate(captured.row_indices)}
            states = {index: captured.row(places[index]).hidden_states for index in self._reference}
            return self._compare(states, self._reference)
        if self._next_tokens:
            agreement = sum(self._next_tokens.values()) / len(self._next_tokens)
            rows = tuple(self._next_tokens)
            return ParityReport(method="argmax", rows=rows, tokens=len(rows), agreement=agreement)
        return None

    def _compare(self, states: Mapping[int, Tensor], reference: Mapping[int, Tensor]) -> ParityReport:
        return compare_states(states, reference, self._collector.facts.layer_ids, self._config.parity_cosine)

    def _head_agrees(self, last_H: Tensor, token: int) -> bool:
        """Whether head(norm(state)) has its maximum at the engine's greedy token, up to rounding."""
        from speculators_core.verifier.weights import read_head

        head = read_head(self._verifier_dir)
        state = last_H.float()
        weight = head.norm_H.float() + (1.0 if self._facts.norm_convention == "one_plus" else 0.0)
        normed = state * torch.rsqrt(state.pow(2).mean() + self._facts.rms_norm_eps) * weight
        logits_V = (head.head_VH @ normed.to(head.head_VH.dtype)).float()
        return bool(logits_V[token] >= logits_V.max() - _ROUNDING * logits_V.abs().max())


_LEAST_AGREEMENT = 0.9
_ROUNDING = 0.01
"""Part of the largest logit by which the engine's choice may lie below the maximum: bfloat16 keeps 8 bits."""


def compare_states(
    captured: Mapping[int, Tensor], reference: Mapping[int, Tensor], layer_ids: Sequence[int], least: float
) -> ParityReport:
    """Cosine of captured states with a reference, by layer (decision 14: at least 0.999).

    Args:
        captured, reference: row index -> [T, K, H]; the shorter of the two lengths is compared.
        least: the mean cosine over tokens that each layer of each row must reach.

    Raises:
        CaptureError: names the worst layer and row, and what that usually means.
    """
    mean_RK, worst_RK, tokens = [], [], 0
    for row, expected in reference.items():
        length = min(expected.shape[0], captured[row].shape[0])
        cosine_TK = torch.cosine_similarity(captured[row][:length].float(), expected[:length].float(), dim=-1)
        mean_RK.append(cosine_TK.mean(dim=0))
        worst_RK.append(cosine_TK.min(dim=0).values)
        tokens += length
    means, worsts = torch.stack(mean_RK), torch.stack(worst_RK)
    rows = tuple(reference)
    report = ParityReport(
        method="hf",
        rows=rows,
        tokens=tokens,
        layers=tuple(
            LayerParity(layer=layer, cosine=float(means[:, k].min()), worst_token=float(worsts[:, k].min()))
            for k, layer in enumerate(layer_ids)
        ),
    )
    bad = [entry for entry in report.layers if not entry.cosine >= least]
    if bad:
        entry = min(bad, key=lambda one: one.cosine)
        row = rows[int(means[:, layer_ids.index(entry.layer)].argmin())]
        last = entry.layer == layer_ids[-1]
        hint = " (the last layer must be taken before the final norm)" if last and len(bad) == 1 else ""
        raise CaptureError(
            f"captured states differ from a Hugging Face forward: layer {entry.layer} of row {row} has cosine "
            f"{entry.cosine:.4f}, needed is {least}{hint}",
            mend="check that engine and verifier directory are the same model; capture.source=hf takes the states from "
            "the Hugging Face forward instead",
        )
    return report
