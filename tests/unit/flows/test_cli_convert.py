"""`draftsmith convert` as its user meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.environment import ROOT, child_environment
from tests.unit.speculators_core.algorithms.tiny import write_verifier
from tests.unit.speculators_core.convert import foreign_drafts as foreign


def run_convert(home: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flows.cli", "convert", *map(str, arguments)]
    return subprocess.run(
        command, cwd=ROOT, env=child_environment(home), capture_output=True, text=True, timeout=300, check=False
    )


def test_a_foreign_draft_becomes_one_of_ours_or_says_why_not(tmp_path: Path) -> None:
    verifier = write_verifier(tmp_path / "verifier")
    tensors = {**foreign.filled(foreign.eagle3_shapes()), **foreign.tables()}
    source = foreign.write(tmp_path / "theirs", foreign.eagle3_config(), tensors)
    target = tmp_path / "ours"
    done = run_convert(
        tmp_path,
        source,
        target,
        "--verifier",
        verifier,
        "--publish-as",
        "org/verifier",
        "--aux-layers",
        "1,4,6",
        "--json",
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["layout"], told["algorithm"], told["path"]) == ("safeai", "eagle3", str(target))
    config = json.loads((target / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 4, 6]
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/verifier"
    again = run_convert(tmp_path, source, target, "--verifier", verifier)
    assert again.returncode == 2 and "exists already" in again.stderr
    missing = run_convert(tmp_path, tmp_path / "nothing", tmp_path / "x")
    assert missing.returncode == 2 and "no draft at" in missing.stderr and "Traceback" not in missing.stderr
