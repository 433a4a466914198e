"""Speculative decoding as an engine does it, one sequence at a time: exact, and easy to read.

Counted as vLLM's scheduler counts: a draft is counted when it is verified, with all of its accepted tokens, also those
that the reply's end then cuts off.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from speculators_core.evaluation.drafts import ServedDraft
from speculators_core.evaluation.reference.verifier import ReferenceVerifier
from speculators_core.types import DraftContext


@dataclass(frozen=True)
class Sampling:
    """temperature: 0 is greedy · seed: of the draws; verifier and draft draw at the same temperature."""

    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Reply:
    """A reply, and how many tokens of each of its drafts were accepted."""

    token_ids: tuple[int, ...]
    accepted: tuple[int, ...]

    def accepted_per_position(self, k: int) -> tuple[int, ...]:
        """Drafts whose position i was accepted."""
        return tuple(sum(count > place for count in self.accepted) for place in range(k))


class Drafter:
    """A served draft that proposes tokens with the distributions that they were drawn from.

    Its products are rounded to the dtype of the verifier's states, as an engine's are: the best of rounded logits is
    now and then another.
    """

    def __init__(self, draft: ServedDraft) -> None:
        self._proposer, self._model = draft.proposer, draft.module()

    def propose(self, context: DraftContext, k: int, dice: Dice) -> tuple[list[int], list[Tensor]]:
        """k tokens, and for each its distribution [V]."""
        tokens: list[int] = []
        distributions: list[Tensor] = []

        def choose(place: int, logits_V: Tensor) -> int:
            assert place == len(tokens)
            distributions.append(dice.distribution(logits_V))
            tokens.append(dice.draw(distributions[-1]))
            return tokens[-1]

        dtype = context.aux_TAH.dtype
        with torch.autocast(context.aux_TAH.device.type, dtype, enabled=dtype in (torch.bfloat16, torch.float16)):
            self._proposer.logits(self._model, context, k, choose)
        return tokens, distributions


class Dice:
    """Draws of one reply."""

    def __init__(self, sampling: Sampling) -> None:
        self._temperature = sampling.temperature
        self._generator = torch.Generator().manual_seed(sampling.seed)

    def distribution(self, logits_V: Tensor) -> Tensor:
        """float32 [V] at the temperature; at 0 all of it on the first of the best."""
        if self._temperature == 0:
            return torch.zeros_like(logits_V, dtype=torch.float32).index_fill(0, logits_V.argmax(), 1.0)
        return torch.softmax(logits_V.float() / self._temperature, dim=-1)

    def draw(self, distribution_V: Tensor) -> int:
        """A token."""
        if self._temperature == 0:
            return int(distribution_V.argmax())  # a draw would make a random number for each token
        return int(torch.multinomial(distribution_V, 1, generator=self._generator))

    def accepts(self, p: float, q: float) -> bool:
        """With chance min(1, p / q)."""
        return float(torch.rand((), generator=self._generator)) * q < p


def verify(proposed: Sequence[int], drafted: Sequence[Tensor], target_KV: Tensor, dice: Dice) -> tuple[int, int]:
    """Speculative sampling (arXiv 2211.17192, algorithm 1): tokens come out as the verifier alone would draw them.

    Args:
        drafted: distribution [V] that each proposed token was drawn from.
        target_KV: the verifier's logits at each of them, and one row more.

    Returns:
        how many proposed tokens are accepted, and the verifier's own token behind them.
    """
    for place, (token, q_V) in enumerate(zip(proposed, drafted, strict=True)):
        p_V = dice.distribution(target_KV[place])
        if not dice.accepts(float(p_V[token]), float(q_V[token])):
            left_V = (p_V - q_V).clamp_min(0.0)
            return place, dice.draw(left_V if bool(left_V.any()) else p_V)  # nothing left: equal but for rounding
    return len(proposed), dice.draw(dice.distribution(target_KV[len(proposed)]))


def speculate(
    verifier: ReferenceVerifier,
    drafter: Drafter,
    prompt: Sequence[int],
    *,
    k: int,
    max_new_tokens: int,
    ends: Collection[int],
    sampling: Sampling | None = None,
) -> Reply:
    """The reply to one prompt.

    Args:
        verifier: made with the layers that the draft reads and, last, its own last one.
        k: drafted tokens a step.
        ends: tokens that end a reply, and belong to it.
        sampling: None: greedy.
    """
    dice = Dice(sampling or Sampling())
    verifier.begin()
    logits, states = verifier.feed(prompt)
    tokens = [*prompt, dice.draw(dice.distribution(logits[-1]))]
    features_TF = _features(states)
    accepted: list[int] = []
    reply = tokens[len(prompt) :]
    while (whole := _ended(reply, max_new_tokens, ends)) is None:
        context = DraftContext(torch.tensor(tokens[1:]), features_TF)
        proposed, drafted = drafter.propose(context, k, dice)
        logits, states = verifier.feed([tokens[-1], *proposed])
        count, own = verify(proposed, drafted, logits, dice)
        verifier.keep(len(tokens) + count)
        tokens += [*proposed[:count], own]
        features_TF = torch.cat([features_TF, _features(states[: count + 1])])
        accepted.append(count)
        reply = tokens[len(prompt) :]
    return Reply(tuple(reply[:whole]), tuple(accepted))


def _ended(reply: Sequence[int], limit: int, ends: Collection[int]) -> int | None:
    """The reply's length once it is at its end, None before."""
    end = next((place + 1 for place, token in enumerate(reply) if token in ends), None)
    length = min(limit, len(reply) if end is None else end)
    return length if end is not None or len(reply) >= limit else None


def _features(states_NKH: Tensor) -> Tensor:
    """What a draft reads [N, F]: the inner layers that were asked for, or the last where there are no others."""
    return (states_NKH[:, :-1] if states_NKH.shape[1] > 1 else states_NKH).flatten(1)
