"""A draft's own rotation, from whatever its verifier's is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from speculators_core.algorithms._blocks.geometry import geometry_for
from speculators_core.algorithms._blocks.rotary import Rotary
from speculators_core.verifier.facts import read_facts
from tests.unit.speculators_core.algorithms.tiny import write_verifier

PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
TABLES = {"short_factor": [1.0, 1.1, 1.2], "long_factor": [1.0, 4.0, 9.0], "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("verifiers", "own"),
    [
        ({"rope_type": "mrope", "mrope_section": [1, 1, 2]}, PLAIN),
        ({"rope_type": "longrope", "partial_rotary_factor": 0.75, **TABLES}, PLAIN),
        ({"type": "su", **TABLES}, PLAIN),
        (YARN, YARN),
    ],
)
def test_a_draft_turns_as_it_is_served(tmp_path: Path, verifiers: dict[str, Any], own: dict[str, Any]) -> None:
    facts = read_facts(write_verifier(tmp_path, rope_scaling=verifiers))
    geometry = geometry_for(facts, style="llama", num_layers=1, sliding_window=None)
    assert geometry.rope_parameters == own
    assert Rotary(geometry).inverse_frequencies.shape == (geometry.head_dim // 2,)
