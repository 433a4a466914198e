"""`draftsmith stitch` as its user meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from speculators_core.algorithms.mtp.build import build
from speculators_core.algorithms.mtp.config import MTPConfig
from speculators_core.algorithms.mtp.export import export
from speculators_core.formats.card import ModelCard
from speculators_core.formats.directory import write_draft
from tests.environment import ROOT, child_environment
from tests.unit.speculators_core.algorithms.native_heads import write_native_verifier

FIXTURES = ROOT / "tests" / "fixtures"


def stitch(home: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flows.cli", "stitch", *map(str, arguments)]
    return subprocess.run(
        command, cwd=ROOT, env=child_environment(home), capture_output=True, text=True, timeout=120, check=False
    )


def test_a_head_goes_back_and_the_engine_is_told_how(tmp_path: Path) -> None:
    verifier = write_native_verifier(tmp_path / "verifier", "mimo")
    config = MTPConfig(num_speculative_steps=2)
    head = export(config, build(config, verifier, None, 0), "org/verifier")
    draft = write_draft(tmp_path / "draft", head, ModelCard(title="head"))
    done = stitch(tmp_path, draft, verifier, tmp_path / "whole", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["speculative_config"] == {"method": "mtp", "num_speculative_tokens": 2}
    assert told["replaced_tensors"] == len(head.tensors)
    assert (tmp_path / "whole" / "model.safetensors").is_file()
    again = stitch(tmp_path, draft, verifier, tmp_path / "whole")
    assert again.returncode == 2 and "exists already" in again.stderr


def test_a_draft_that_is_served_alone_is_refused(tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "config.json").write_text((FIXTURES / "eagle3_llama_128.config.json").read_text())
    done = stitch(tmp_path, alone, tmp_path, tmp_path / "whole")
    assert done.returncode == 2 and "served alone" in done.stderr and "Traceback" not in done.stderr
