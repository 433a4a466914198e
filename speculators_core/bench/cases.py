"""What the benches tell both sides about an algorithm: our knobs, the peer's flags for the same thing, and K.

One line of shapes for both: as many layers, the same windows, losses and norms. Adding an algorithm to the benches is
adding a case.
"""

from __future__ import annotations

import difflib

from pydantic import Field

from speculators_core.errors import ConfigError
from speculators_core.types import Json, StrictModel


class Case(StrictModel):
    """One algorithm as both sides train it."""

    name: str = Field(description="what the bench calls it")
    ours: dict[str, Json] = Field(description="a recipe's `algorithm`, without its layers")
    peer: str = Field(description="flags of the peer's trainer")
    k: int = Field(ge=1, description="drafted tokens a step when its acceptance is measured")


CASES = (
    Case(
        name="eagle3",
        ours={"kind": "eagle3", "ttt_steps": 3, "layers": 1, "style": "llama", "loss": "kl_div"},
        peer="--speculator-type eagle3 --num-layers 1 --draft-arch llama --ttt-steps 3 --ttt-step-loss-decay 1.0 "
        "--loss-fn kl_div --norm-before-residual --norm-before-fc --norm-output --sliding-window 2048",
        k=3,
    ),
    Case(
        name="peagle",
        ours={
            "kind": "peagle",
            "num_depths": 4,
            "max_anchors": 512,
            "mask_token_id": 0,
            "layers": 1,
            "style": "llama",
            "loss": "kl_div",
        },
        peer="--speculator-type peagle --num-layers 1 --draft-arch llama --num-depths 4 --max-anchors 512 "
        "--loss-fn kl_div --norm-before-residual --norm-before-fc --sliding-window 2048",
        k=4,
    ),
)


def case(name: str) -> Case:
    """The case of that name; ConfigError with the nearest right one."""
    found = {case.name: case for case in CASES}
    if name not in found:
        nearest = difflib.get_close_matches(name, found, n=1) or sorted(found)
        raise ConfigError(f"no bench case {name!r}", mend=f"did you mean {', '.join(nearest)}?")
    return found[name]
