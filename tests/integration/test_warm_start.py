"""The draft that a recipe says training begins from, resolved against a real registry to bytes that cannot move."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from speculators_core.config import load_recipe
from speculators_core.evaluation.served import draft_digest
from speculators_core.run import Run
from tasks.adapters.settings import read_settings
from tasks.adapters.tracking import Tracking
from tasks.warm_start import BEGAN_TAG, began_from
from tests.environment import ROOT, child_environment
from tests.integration.test_mlflow_registry import Draft
from tests.unit.speculators_core.algorithms.tiny import write_verifier

MODEL = "chat"
CHILD = """
import json, sys
from pathlib import Path
from speculators_core.config import load_recipe
from speculators_core.errors import DraftsmithError
from tasks.warm_start import recipe_start
for name in sys.argv[2:]:
    try:
        start = recipe_start(load_recipe(Path(sys.argv[1]), [f"training.warm_start={name}"]))
        print(json.dumps(None if start is None else start.model_dump(mode="json")))
    except DraftsmithError as error:
        print(json.dumps({"error": type(error).__name__, "what": error.what, "mend": error.mend}))
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    verifier = write_verifier(tmp_path / "verifier")
    (verifier / "tokenizer.json").write_text("{}")
    content = {
        "name": "chat",
        "deployment": MODEL,
        "verifier": {"path": str(verifier)},
        "data": {"sources": ["nowhere.jsonl"]},
        "algorithm": {"kind": "eagle3"},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(content))
    return tmp_path / "recipe.yaml"


def starts(home: Path, recipe: Path, *names: str) -> list[Any]:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(recipe), *names],
        env=child_environment(home), cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_names_become_digests(recipe: Path, tmp_path: Path) -> None:
    home, directory = tmp_path / "home", tmp_path / "some-draft"
    directory.mkdir()
    (directory / "config.json").write_text('{"speculators_config": {}}')
    (directory / "model.safetensors").write_bytes(b"weights")
    nothing, missing, found, away = starts(home, recipe, "champion", f"{MODEL}@best", str(directory), "no/such")
    assert nothing is None, "where nothing serves yet, the first loop of a recipe begins from random weights"
    assert missing["error"] == "ConfigError" and "training.warm_start" in missing["what"] and missing["mend"]
    assert (found["digest"], found["path"], found["before"]) == (draft_digest(directory), str(directory), [])
    assert away["error"] == "ConfigError" and "no/such" in away["what"]

    tracking = Tracking(read_settings({"DRAFTSMITH_HOME": str(home)}))
    run_id = tracking.open_parent("9" * 64, name="recipe", tags={})
    tokenizer = Run(load_recipe(recipe), home).fingerprint.parts["tokenizer"]
    began = {"digest": "a" * 64, "head": True}
    first, second = Draft(tmp_path / "one", b"one"), Draft(tmp_path / "two", b"two")
    fresh = first.register(tracking, MODEL, run_id, tokenizer_sha256=tokenizer, extra={"training.began_from": "null"})
    later = second.register(tracking, MODEL, run_id, extra={"training.began_from": json.dumps(began)})
    tracking.client.set_registered_model_alias(MODEL, "champion", fresh.version)
    tracking.client.set_registered_model_alias(MODEL, "best", later.version)
    champion, best, other = starts(home, recipe, "champion", f"{MODEL}@best", "another@best")
    assert champion["digest"] == first.ref.digest and champion["head"] and champion["before"] == [None]
    assert Path(champion["path"], "model.safetensors").read_bytes() == b"one"
    assert best["digest"] == second.ref.digest and not best["head"], "registered for another tokenizer"
    assert best["before"] == [{**began, "path": None, "before": []}]
    assert other["error"] == "ConfigError" and "another" in other["what"]

    tracking.client.set_registered_model_alias(MODEL, "champion", later.version)
    assert starts(home, recipe, "champion")[0]["digest"] == second.ref.digest, "an alias is looked up each time"


def test_what_a_tag_says_of_an_earlier_beginning_counts_only_where_it_can_be_read() -> None:
    assert began_from({BEGAN_TAG: "null"}) == (None,)
    for text in ("", "{", "[1]", '{"digest": 1}'):
        assert began_from({BEGAN_TAG: text}) == () == began_from({})
