"""Where an output cannot be written, or would take another file's place, is told before any work begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.flows.test_cli import draftsmith

RECIPE = "deployments/recipes/demo.yaml"


@pytest.mark.parametrize(
    ("command", "option"), [(("data", "synthesise"), "-o"), (("data", "regenerate"), "-o"), (("export",), "--to")]
)
def test_nothing_that_is_there_is_replaced(tmp_path: Path, command: tuple[str, ...], option: str) -> None:
    talks = tmp_path / "talks.jsonl"
    talks.write_text("mine")
    done = draftsmith(tmp_path, *command, RECIPE, "--set", f"data.sources=[{talks}]", option, str(talks))
    assert done.returncode == 2 and f"{talks} exists already" in done.stderr, done.stderr
    assert talks.read_text() == "mine" and [*tmp_path.glob("*talks*")] == [talks]


@pytest.mark.parametrize(("command", "option"), [(("data", "vocabulary"), "--plot"), (("plan",), "--out")])
def test_a_place_that_cannot_be_written_costs_no_work(tmp_path: Path, command: tuple[str, ...], option: str) -> None:
    done = draftsmith(tmp_path, *command, RECIPE, option, str(tmp_path))
    assert done.returncode == 2 and "cannot be written: Is a directory" in done.stderr, done.stderr
