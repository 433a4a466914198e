"""What the benches tell both sides about an algorithm: our knobs, the peer's flags for the same thing, and K.

One line of shapes for both: as many layers, the same windows, losses and norms. Adding an algorithm to the benches is
adding a case.
"""

from __future__ import annotations

import difflib
from typing import Literal

from pydantic import Field

from speculators_core import registry
from speculators_core.errors import ConfigError
from speculators_core.types import Json, StrictModel


class Case(StrictModel):
    """One algorithm as both sides train it."""

    name: str = Field(description="what the bench calls it")
    ours: dict[str, Json] = Field(description="a recipe's `algorithm`, without its auxiliary layers")
    peer: str | None = Field(description="flags of the peer's trainer; null: it has no such training of this kind")
    k: int = Field(ge=1, description="drafted tokens a step when its acceptance is measured")
    by: Literal["engine", "reference"] = Field(
        "engine", description="what measures it: the reference loop where an engine on a CPU cannot serve it"
    )
    whole_vocabulary: bool = Field(False, description="it proposes from all of the verifier's tokens")


_BLOCKS: dict[str, Json] = {"layers": 1, "block_size": 8, "max_anchors": 512, "mask_token_id": 0}
_PEER_BLOCKS = "--num-layers 1 --block-size 8 --max-anchors 512 --sliding-window 2048"

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
    Case(
        name="dflash",
        ours={"kind": "dflash", **_BLOCKS},
        peer=f"--speculator-type dflash {_PEER_BLOCKS} --loss-fn ce --per-position-loss-weight dpace",
        k=7,
    ),
    Case(
        name="dspark",
        ours={"kind": "dspark", **_BLOCKS, "markov_rank": 128},
        peer=f"--speculator-type dspark {_PEER_BLOCKS} --loss-fn kl_div --markov-rank 128",
        k=8,
        by="reference",
    ),
    Case(
        name="dflash2",
        ours={"kind": "dflash2", **_BLOCKS, "selector_rank": 128},
        peer=f"--speculator-type dflash2 {_PEER_BLOCKS} --loss-fn kl_div --selector-rank 128",
        k=7,
        by="reference",
        whole_vocabulary=True,
    ),
    Case(
        name="xpress",
        ours={"kind": "xpress", **_BLOCKS, "xpress_rank": 128},
        peer=f"--speculator-type xpress {_PEER_BLOCKS} --xpress-rank 128",
        k=7,
        by="reference",
    ),
    # The peer trains heads of Qwen 3-Next and 3.5 alone, whose verifiers do not run on a CPU.
    Case(name="mtp", ours={"kind": "mtp", "num_speculative_steps": 3}, peer=None, k=3, whole_vocabulary=True),
)


def case(name: str) -> Case:
    """The case of that name; ConfigError with the nearest right one."""
    found = {case.name: case for case in CASES}
    if name not in found:
        nearest = difflib.get_close_matches(name, found, n=1) or sorted(found)
        raise ConfigError(f"no bench case {name!r}", mend=f"did you mean {', '.join(nearest)}?")
    return found[name]


def suited(reads_layers: bool) -> tuple[Case, ...]:
    """The cases that can be trained on states of inner layers, or on those of the last layer alone."""
    return tuple(each for each in CASES if bool(_layers_read(each)) == reads_layers)


def _layers_read(each: Case) -> tuple[int, ...]:
    algorithm = registry.resolve(str(each.ours["kind"]))
    return algorithm.aux_layers(algorithm.config.model_validate(each.ours), 32)
