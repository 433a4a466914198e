"""What a recipe says about its loss: a name, or a weighted sum of names."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from speculators_core.errors import ConfigError

LOSS_NAMES = ("kl_div", "rkl", "jsd", "ce", "tv", "nla", "lk_hybrid")
"""What `closed_form.LOSSES` implements; named here so that reading a recipe needs no torch."""


@dataclass(frozen=True)
class LossTerm:
    """One summand: the loss's name and its weight, used as it is (weights need not sum to one)."""

    name: str
    weight: float


def parse_loss(spec: str | Mapping[str, float]) -> tuple[LossTerm, ...]:
    """Read `"kl_div"`, `{"kl_div": 0.5, "tv": 0.5}` or the same mapping as a JSON string.

    Raises:
        ConfigError: no term, an unknown name, or a weight that is not a positive number.
    """
    if isinstance(spec, str):
        text = spec.strip()
        if not text.startswith("{"):
            return (_term(text, 1.0),)
        try:
            spec = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"the loss {text!r} is not valid JSON: {error}", mend='write e.g. {"kl_div": 0.5, "tv": 0.5}'
            ) from error
        if not isinstance(spec, Mapping):
            raise ConfigError(f"the loss {text!r} is not a mapping", mend='write e.g. {"kl_div": 0.5, "tv": 0.5}')
    if not spec:
        raise ConfigError("the loss has no term", mend=f"name one of {', '.join(LOSS_NAMES)}")
    return tuple(_term(name, weight) for name, weight in spec.items())


def _term(name: str, weight: float) -> LossTerm:
    if name not in LOSS_NAMES:
        nearest = difflib.get_close_matches(name, LOSS_NAMES, n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"choose among {', '.join(LOSS_NAMES)}"
        raise ConfigError(f"unknown loss {name!r}", mend=hint)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
        raise ConfigError(f"the weight of loss {name!r} is {weight!r}", mend="give a positive number")
    return LossTerm(name, float(weight))
