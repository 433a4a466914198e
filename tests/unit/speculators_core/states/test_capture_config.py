"""Names of backends and codecs are checked when a recipe is read, not when an engine runs."""

from __future__ import annotations

import typing
from pathlib import Path

import pytest

from hs_connectors.codecs import CODECS
from speculators_core.config import load_recipe
from speculators_core.errors import ConfigError
from speculators_core.keys import describe_keys
from speculators_core.states.config import CaptureConfig
from tests.environment import ROOT

DEMO = ROOT / "deployments" / "recipes" / "demo.yaml"


@pytest.mark.parametrize(
    ("override", "told"),
    [
        (
            "capture.backend=mooncak",
            r"`capture.backend`: .*'mooncak'; did you mean 'mooncake'\? those .*states: file, mooncake",
        ),
        (
            "capture.runtime={url: 'http://gpu:8000', store: {backend: s4, config: {root: s3://b/p}}}",
            "`capture.runtime.store.backend`: .*did you mean 's3'",
        ),
        ("capture.codec=fp9", "`capture.codec` must be 'none' or 'fp8', not \"fp9\""),
    ],
)
def test_a_name_that_nobody_has_is_refused_with_the_recipe(override: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_recipe(DEMO, [override])


def test_a_backend_of_another_distribution_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "theirs-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[hs_connectors.backends]\ntheirs = nowhere:Theirs\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_recipe(DEMO, ["capture.backend=theirs"]).capture.backend == "theirs"
    with pytest.raises(ConfigError, match="states: file, mooncake, s3, shm, theirs"):
        load_recipe(DEMO, ["capture.backend=carrier"])


def test_the_codecs_of_a_recipe_are_those_there_are_and_the_keys_list_the_values() -> None:
    assert set(typing.get_args(CaptureConfig.model_fields["codec"].annotation)) == set(CODECS)
    listed = {key.name: f"{key.type}; {key.meaning}" for key in describe_keys("capture")}
    assert "none | fp8" in listed["capture.codec"]
    assert "file, mooncake, s3, shm" in listed["capture.backend"]
