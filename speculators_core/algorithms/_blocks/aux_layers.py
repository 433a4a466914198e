"""Which verifier layers feed a draft."""

from __future__ import annotations

from typing import Protocol

from speculators_core.errors import ConfigError


class ReadsLayers(Protocol):
    """Knobs of a draft that reads states of the verifier's inner layers."""

    @property
    def aux_layers(self) -> tuple[int, ...] | None:
        """Their ids; None: the default."""
        ...


def aux_layers(knobs: ReadsLayers, num_hidden_layers: int) -> tuple[int, ...]:
    """`chosen_layers` of the knobs."""
    return chosen_layers(knobs.aux_layers, num_hidden_layers)


def chosen_layers(named: tuple[int, ...] | None, num_hidden_layers: int) -> tuple[int, ...]:
    """Auxiliary layer ids, ascending: 0 is the embedding's output, i the residual stream after i layers.

    Args:
        named: the recipe's own choice; None for 2, N/2 and N − 3 of N layers.
        num_hidden_layers: N.

    Raises:
        ConfigError: an id out of range, or named twice.
    """
    if named is not None:
        ids = named
    else:
        ids = (2, num_hidden_layers // 2, num_hidden_layers - 3)
        if not 0 <= ids[0] < ids[1] < ids[2]:
            ids = tuple(sorted({max(0, num_hidden_layers - 3), max(0, num_hidden_layers - 2), num_hidden_layers - 1}))
    outside = [index for index in ids if not 0 <= index < num_hidden_layers]
    if outside:
        raise ConfigError(
            f"aux_layers {list(ids)}: {outside} lie outside 0..{num_hidden_layers - 1} of this verifier",
            mend=f"name layers from 0 to {num_hidden_layers - 1}; the last state is captured anyway",
        )
    if len(set(ids)) != len(ids):
        raise ConfigError(f"aux_layers {list(ids)} names a layer twice", mend="name each layer once")
    return tuple(sorted(ids))
