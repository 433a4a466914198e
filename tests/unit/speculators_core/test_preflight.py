"""What is refused before anything expensive."""

from __future__ import annotations

from pathlib import Path

import pytest

from speculators_core import stages
from speculators_core.config import load_recipe
from speculators_core.errors import ConfigError
from speculators_core.run import Run
from tests.environment import ROOT
from tests.unit.speculators_core.algorithms.tiny import write_verifier

DEMO = ROOT / "deployments" / "recipes" / "demo.yaml"


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("draft_vocabulary=16000000", "draft_vocabulary is 16000000, but the verifier's vocabulary has [0-9]+ tokens"),
        ("data.max_length=16000000", "data.max_length is 16000000, but the verifier's context is [0-9]+"),
    ],
)
def test_sizes_that_the_verifiers_config_denies_are_refused_before_its_weights_are_read(
    tmp_path: Path, override: str, told: str
) -> None:
    verifier = write_verifier(tmp_path / "verifier")
    (verifier / "model.safetensors").unlink()  # hashing them would take minutes
    with pytest.raises(ConfigError, match=rf"{told}\n  mend: set .* to at most"):
        stages.preflight(
            Run(load_recipe(DEMO, [f"verifier.path={verifier}", "draft_vocabulary=null", override]), tmp_path / "home")
        )
