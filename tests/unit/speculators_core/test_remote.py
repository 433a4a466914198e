"""Commands that start servers for a recipe; what such servers answer is in tests/engine/test_remote.py."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from speculators_core import registry
from speculators_core.config import load_recipe
from speculators_core.errors import ConfigError, FormatError
from speculators_core.evaluation.served import draft_digest, served_name
from speculators_core.formats.card import ModelCard
from speculators_core.formats.directory import write_draft
from speculators_core.remote import capture_command, draft_command
from speculators_core.run import Run
from tests.environment import ROOT
from tests.unit.speculators_core.algorithms.tiny import vocabulary, write_verifier

RECIPE = ROOT / "deployments" / "recipes" / "demo.yaml"


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("draft")
    verifier, algorithm = write_verifier(root / "verifier"), registry.resolve("eagle3")
    config = algorithm.config()
    model = algorithm.build(config, verifier, vocabulary(), 0)
    return write_draft(root / "draft", algorithm.export(config, model, str(verifier)), ModelCard(title="t"))


def test_a_draft_is_served_under_the_name_of_its_bytes(draft: Path, tmp_path: Path) -> None:
    run = Run(load_recipe(RECIPE, ["runtime={url: 'http://gpu:8010'}"]), tmp_path)
    command = draft_command(run, draft, model="/there/draft")
    after = {flag: value for flag, value in pairwise(command) if flag.startswith("--")}
    assert after["--served-model-name"] == served_name(draft_digest(draft))  # the last one counts
    assert (after["--model"], after["--port"], after["--host"]) == ("/there/draft", "8010", "0.0.0.0")
    assert after["--per-request-spec-decode-metrics"] == "detailed"
    assert after["--speculative-config"] == '{"num_speculative_tokens": 3}'
    with pytest.raises(FormatError):
        draft_command(run, tmp_path)


def test_a_recipe_without_such_a_server_teaches(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"names no server of somebody else[\s\S]*capture\.runtime="):
        capture_command(Run(load_recipe(RECIPE), tmp_path))
