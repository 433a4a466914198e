"""On the real engine: a template that says the same keeps the champion; tuned weights train another from its own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from loop import ROOT, await_silence, run

from tests.environment import child_environment

pytestmark = [pytest.mark.engine, pytest.mark.trial]
VERIFIER = ROOT / ".draftsmith" / "verifiers" / "SmolLM2-135M-Instruct"


def apply(home: Path, plan: Path) -> dict[str, Any]:
    argv = [sys.executable, "-m", "flows.cli", "apply", str(plan), "--json"]
    done = subprocess.run(
        argv, env=child_environment(home), cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_champion_is_kept_in_step(tmp_path: Path) -> None:
    home, verifier, plan = tmp_path / "home", tmp_path / "verifier", tmp_path / "plan.json"
    shutil.copytree(VERIFIER, verifier)
    # a wide margin: the few prompts of a small run tell little
    small = {"verifier.path": str(verifier), "gate": "{al_floor: 1.0, min_prompts: 8, speed: report, margin: 0.5}"}

    def planned() -> dict[str, Any]:
        done = run(home, "plan", "--json", "--out", str(plan), **small)
        assert done.returncode == 0, done.stderr[-3000:]
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    assert planned()["action"] == "retrain-afresh"
    first = apply(home, plan)
    assert first["loop"]["registry"]["version"] == "1" and first["incumbent"] is None
    assert planned()["action"] == "nothing"

    template = verifier / "chat_template.jinja"
    template.write_text("{# says the same #}" + template.read_text())
    told = planned()
    assert (told["action"], told["changes"]) == ("re-evaluate", ["chat_template"])
    assert told["stages"][0]["name"] == "prepare" and "chat template" in told["stages"][0]["why"]
    kept = apply(home, plan)
    assert kept["kept"] and kept["loop"] is None and kept["incumbent"]["cell"]["outcome"] == "pass"
    assert "in step" in run(home, "why", **small).stdout
    assert planned()["action"] == "nothing"

    weights = safetensors.torch.load_file(verifier / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * 1.01
    safetensors.torch.save_file(weights, verifier / "model.safetensors", metadata={"format": "pt"})
    told = planned()
    assert (told["action"], told["changes"]) == ("retrain", ["weights", "chat_template"])
    assert told["warm_start"] == "1"
    done = apply(home, plan)
    assert done["incumbent"]["version"] == "1" and done["incumbent"]["cell"]["al"] >= 1.0, "doing nothing is measured"
    assert done["loop"]["registry"]["version"] == "2"
    reports = [json.loads(path.read_text()) for path in home.glob("store/training/*/data/result.json")]
    assert sorted(report["warm_start"] for report in reports) == [False, True]
    await_silence(home)
