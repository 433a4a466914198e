"""What is refused before anything expensive."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from speculators_core import stages
from speculators_core.config import load_recipe
from speculators_core.errors import CaptureError, ConfigError, EngineError
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


def test_a_store_that_does_not_answer_is_told_before_an_engine_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    store = "capture={backend: s3, backend_config: {root: 's3://no/p', endpoint_url: 'http://127.0.0.1:9'}}"
    recipe = load_recipe(
        DEMO, [f"verifier.path={write_verifier(tmp_path / 'verifier')}", f"runtime.python={tmp_path / 'none'}", store]
    )
    run = Run(recipe, tmp_path / "home", check=False)
    with pytest.raises(CaptureError, match="s3://no/p cannot be listed"):
        stages.preflight(run)
    with pytest.raises(EngineError, match="no interpreter"):  # who only looks stays offline
        stages.preflight(replace(run, only_look=True))
    with pytest.raises(ConfigError, match=r"capture\.backend_config: the s3 backend takes root"):
        stages.preflight(replace(run, recipe=load_recipe(DEMO, ["capture.backend=s3"])))
