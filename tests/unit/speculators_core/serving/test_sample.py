"""What `serve.engine.sample` becomes on an engine's command line is what the sampler in there reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hs_connectors.vllm.sampler import VARIABLE, SampleSettings
from speculators_core.config import validate
from speculators_core.engine.config import ServerSpec, build_arguments
from speculators_core.errors import ConfigError
from speculators_core.serving.config import ServeConfig
from speculators_core.serving.version import ServedVersion, server_spec

SAMPLE = {"directory": "/data/sampled", "rate": 0.25, "acceptance_below": 1.4, "redact": "package:mask"}


def spec_of(tmp_path: Path, **engine: object) -> ServerSpec:
    (tmp_path / "config.json").write_text(json.dumps({"speculators_model_type": "any"}))
    version = ServedVersion(
        model="chat", version="7", verifier=tmp_path, verifier_fingerprint="f" * 64, draft=tmp_path, draft_files={}
    )
    return server_spec(version, validate(ServeConfig, {"engine": engine}, where="serve").engine, tmp_path)


def test_the_sampler_is_off_unless_asked_for(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    assert VARIABLE not in spec.env and "--middleware" not in build_arguments(spec, 8000)


def test_the_sampler_reads_what_the_recipe_says(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, sample=SAMPLE, extra_args=["--foo"], k=3)
    assert SampleSettings.from_environment(spec.env) == SampleSettings(**SAMPLE)  # type: ignore[arg-type]
    words = build_arguments(spec, 8000)
    assert words[words.index("--middleware") + 1] == f"{SampleSettings.__module__}.Sampler" and "--foo" in words
    assert "--per-request-spec-decode-metrics" in words, "else no acceptance is known"
    without = spec_of(tmp_path, sample={**SAMPLE, "acceptance_below": None}, k=3)
    assert "--per-request-spec-decode-metrics" not in build_arguments(without, 8000)


@pytest.mark.parametrize(
    "wrong", [{"directory": "/x"}, {"directory": "/x", "rate": 2}, {"rate": 1}, {**SAMPLE, "a": 1}]
)
def test_what_samples_nothing_or_is_not_known_is_refused(tmp_path: Path, wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="sample"):
        spec_of(tmp_path, sample=wrong)
