"""What a captured row must satisfy before it enters a set."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hs_connectors.contract import Record
from speculators_core.errors import CaptureError, ConfigError
from speculators_core.states.shards import StatesFacts
from speculators_core.verifier.facts import VerifierFacts

_ENGINE_MEND = "check that the engine was started by this capture (layers, dtype, verifier) and run the command again"


def check_layers(layer_ids: Sequence[int], num_hidden_layers: int) -> tuple[int, ...]:
    """The layer ids as a tuple: distinct, ascending, in 0 … N, with N (before the final norm) last.

    Raises:
        ConfigError: out of range, repeated, unordered, or without the last.
    """
    ids = tuple(int(layer) for layer in layer_ids)
    if list(ids) != sorted(set(ids)) or not ids:
        raise ConfigError(
            f"layer ids must be distinct and ascending, not {list(ids)}",
            mend="vLLM collapses repeated ids and captures in ascending order: list each layer once, lowest first",
        )
    if ids[0] < 0 or ids[-1] > num_hidden_layers:
        wrong = [layer for layer in ids if not 0 <= layer <= num_hidden_layers]
        raise ConfigError(
            f"layer ids {wrong} are out of range: the verifier has {num_hidden_layers} layers",
            mend=f"use ids from 0 (the embedding's output) to {num_hidden_layers} (after the last layer)",
        )
    if ids[-1] != num_hidden_layers:
        raise ConfigError(
            f"the last captured layer must be {num_hidden_layers}, not {ids[-1]}",
            mend="a draft is trained towards the verifier's last hidden state: add that id at the end",
        )
    return ids


def check_source(source: str, facts: VerifierFacts) -> None:
    """Whether that source can capture this verifier at all.

    Raises:
        ConfigError: the engine, and latent attention.
    """
    if source == "engine" and facts.latent_attention:
        raise ConfigError(
            f"capture.source is engine, but vLLM cannot capture {facts.model_type}: with latent attention (MLA) its "
            "cache has no room for hidden states beside the keys",
            mend="set capture.source to hf: a Hugging Face forward takes the same states",
        )


def check_record(record: Record, row: int, input_ids: Tensor, facts: StatesFacts) -> None:
    """Check one captured record against its request.

    Args:
        input_ids: int64 [T], what was asked for; a record of a generated reply has T − 1 tokens, and is passed with the
            ids cut to that.

    Raises:
        CaptureError: other tokens, length, layers, dtype or verifier; a state that isn't finite; a layer that is zero
            or the same at every token.
    """
    where = f"row {row}"
    states = record.hidden_states
    if record.token_ids.shape != input_ids.shape:
        raise CaptureError(
            f"{where}: {record.token_ids.shape[0]} tokens were captured where {input_ids.shape[0]} were sent",
            mend=_ENGINE_MEND,
        )
    if not torch.equal(record.token_ids, input_ids):
        place = int((record.token_ids != input_ids).nonzero()[0])
        raise CaptureError(
            f"{where}: token {place} of the record is {int(record.token_ids[place])}, sent was {int(input_ids[place])}",
            mend=_ENGINE_MEND,
        )
    if tuple(record.layer_ids) != facts.layer_ids:
        raise CaptureError(
            f"{where}: layers {list(record.layer_ids)} were captured, wanted are {list(facts.layer_ids)}",
            mend=_ENGINE_MEND,
        )
    if record.verifier_fingerprint != facts.verifier_fingerprint:
        raise CaptureError(
            f"{where}: captured from verifier {record.verifier_fingerprint[:12]}, wanted is "
            f"{facts.verifier_fingerprint[:12]}",
            mend="the engine serves another verifier (or another state of it): restart it",
        )
    if states.dtype != getattr(torch, facts.dtype):
        raise CaptureError(f"{where}: states are {states.dtype}, wanted is {facts.dtype}", mend=_ENGINE_MEND)
    expected = (input_ids.shape[0], len(facts.layer_ids), facts.hidden_size)
    if tuple(states.shape) != expected:
        raise CaptureError(f"{where}: states have shape {list(states.shape)}, wanted is {list(expected)}")
    check_states(states, where, facts.layer_ids, varied=bool((input_ids != input_ids[0]).any()))


def check_states(states: Tensor, where: str, layer_ids: Sequence[int], *, varied: bool) -> None:
    """Finite, not zero, and not the same at every token (where the tokens differ at all).

    Args:
        states: [T, K, H].

    Raises:
        CaptureError: names the layer and the first bad token.
    """
    # One reduction instead of isfinite on every element: a sum is finite only when all of its terms are, and an
    # overflow in float32 needs states that no dtype of half the width could hold.
    sums_TK = states.float().abs().sum(dim=-1)
    if not bool(torch.isfinite(sums_TK).all()):
        token, layer = (~torch.isfinite(sums_TK)).nonzero()[0].tolist()
        raise CaptureError(
            f"{where}: the state of layer {layer_ids[layer]} at token {token} is not finite",
            mend="a verifier that overflows in this dtype usually runs in bfloat16 or float32: set capture.dtype",
        )
    for layer in range(states.shape[1]):
        zero = not bool(sums_TK[:, layer].any())
        if zero or (varied and bool((states[:, layer] == states[:1, layer]).all())):
            what = "zero" if zero else "the same at every token"
            raise CaptureError(
                f"{where}: the states of layer {layer_ids[layer]} are {what}",
                mend="the engine does not hand out this layer: try capture.source=hf, or other layers",
            )
