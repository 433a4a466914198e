"""The whole story on the real engine, as `draftsmith demo --story` tells it; some 20 minutes on two idle cores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from loop import ROOT, await_silence

from tests.environment import child_environment

pytestmark = [pytest.mark.engine, pytest.mark.trial]
MARGIN = 0.05


def test_a_deployment_is_kept_in_step(tmp_path: Path) -> None:
    """STORY_HOME names a state root to go on in: chapters that were played there are not played again."""
    home = Path(os.environ.get("STORY_HOME") or tmp_path / "home")
    argv = [sys.executable, "-m", "flows.cli", "demo", "--story"]
    done = subprocess.run(
        argv, env=child_environment(home), cwd=ROOT, capture_output=True, text=True, timeout=4 * 3600, check=False
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-6000:]
    report = json.loads((home / "story" / "story.json").read_text())
    facts: dict[str, dict[str, Any]] = {chapter["title"]: chapter["facts"] for chapter in report["chapters"]}
    assert facts["The first champion"]["version"] == "1"
    assert facts["Nothing changed"]["watch_seconds"] < 5
    for title in ("A light fine-tune", "Only the chat template changed", "Only vLLM changed"):
        found = facts[title]
        assert found.get("skipped") or found["al"] >= (1 - MARGIN) * found["registered_al"], title
    heavy = facts["A fine-tune that matters, under load"]
    assert heavy["fall"] >= 2 * MARGIN and heavy["al"] > heavy["incumbent_al"]
    assert heavy["version"] == "2" and heavy["failed"] == 0 and heavy["requests"] >= 20
    assert facts["A bad draft, by force"]["version"] == "3"
    assert facts["Warm or cold"]["cold_tokens"] > 0
    await_silence(home)
