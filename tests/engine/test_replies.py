"""Prompts and replies by the verifier itself: the commands, and a loop that makes its own replies."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from speculators_core import stages
from speculators_core.config import Recipe, load_recipe
from speculators_core.data.rows import RowSet
from speculators_core.engine.runtime import Runtime
from speculators_core.engine.server import Engine, ServerSpec
from speculators_core.run import Run
from speculators_core.states.sets import StateSet
from tests.environment import ROOT, child_environment

pytestmark = pytest.mark.engine

RECIPE = ROOT / "deployments" / "recipes" / "demo.yaml"


def draftsmith(home: Path, *arguments: str) -> str:
    argv = [sys.executable, "-m", "flows.cli", *arguments]
    done = subprocess.run(
        argv, env=child_environment(home), cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_data_commands(engine: Callable[[ServerSpec], Engine], verifier_dir: Path, tmp_path: Path) -> None:
    """All on the session's engine, which they are given by URL as one that somebody else runs."""
    served = engine(ServerSpec(model=str(verifier_dir), max_model_len=1024, max_num_seqs=32))
    use = ("--set", f"runtime={{url: {served.base_url}}}", "--set", f"verifier.path={verifier_dir}")
    prompts, replies = tmp_path / "prompts.jsonl", tmp_path / "replies.jsonl"
    common = (str(RECIPE), *use)

    report = json.loads(
        draftsmith(tmp_path, "data", "synthesise", *common, "-o", str(prompts), "--prompts", "5", "--json")
    )
    assert report["prompts"] == len(prompts.read_text().splitlines()) == 5

    source = ("--set", f"data.sources=[{prompts}]", "-o", str(replies), "--max-new-tokens", "12", "--json")
    report = json.loads(draftsmith(tmp_path, "data", "regenerate", *common, *source))
    assert report["written"] == report["replies"] == 5 and report["reply_tokens"] <= 5 * 12
    asked, answered = ([json.loads(line) for line in path.read_text().splitlines()] for path in (prompts, replies))
    for before, after in zip(asked, answered, strict=True):
        assert after["messages"][:-1] == before["messages"] and after["messages"][-1]["role"] == "assistant"

    few = ("--set", f"data.sources=[{replies}]", "--set", "data.evaluation_prompts=1", "--rows", "2")
    shown = draftsmith(tmp_path, "data", "sample", *common, *few)
    assert any(record["messages"][0]["content"].split()[0] in shown for record in asked) and "assistant" in shown


def test_a_loop_makes_its_own_replies_and_captures_them_in_the_same_requests(
    runtime: Runtime, verifier_dir: Path, tmp_path: Path
) -> None:
    """One engine start for replies and states; losing the records costs a second pass and changes nothing else."""
    recipe: Recipe = load_recipe(
        RECIPE,
        [
            f"verifier.path={verifier_dir}",
            f"runtime.python={runtime.python}",
            f"data.sources=[{ROOT / 'deployments' / 'data' / 'conversations.jsonl'}]",
            "data.max_rows=10",
            "data.evaluation_prompts=2",
            "data.validation_share=0.2",
            "data.replies=regenerate",
            "data.regeneration={max_new_tokens: 16}",
            "capture.parity_rows=2",
        ],
    )
    run = Run(recipe, tmp_path / "home")
    dataset = stages.prepare(run)
    assert not dataset.cached and dataset.summary["exact_turns"] == 10
    rows = RowSet.open(run.store.path(dataset.ref))
    records = list((run.home / "records").iterdir())
    assert len(records) == 1

    captured = stages.capture(run, dataset.ref)
    assert captured.summary["captured_rows"] == rows.num_rows == 8
    assert len(captured.summary["parity"]["rows"]) == 2
    assert not list((run.home / "records").iterdir()), "what is in the set is kept once"
    assert len(list((run.home / "logs").glob("vllm-*"))) == 1, "one engine start for both"
    states = StateSet.open(run.store.path(captured.ref))
    for index in range(rows.num_rows):
        assert states.row(index).input_ids.tolist() == rows.row(index).input_ids[:-1].tolist()
    assert stages.prepare(run).cached and stages.capture(run, dataset.ref).cached
