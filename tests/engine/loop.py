"""Run the real command over a small recipe in a state root of its own."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.environment import ROOT, child_environment

RECIPE = ROOT / "deployments" / "recipes" / "demo.yaml"
SMALL = {
    "name": "small",
    "data.max_rows": "120",
    "data.evaluation_prompts": "12",
    "draft_vocabulary": "2048",
    # what EAGLE-3's own layout can say too, so that the draft can leave and come back
    "algorithm": "{kind: eagle3, ttt_steps: 3, norm_before_residual: false, norm_before_fc: false, "
    "norm_output: false, sliding_window: null}",
    "training.epochs": "1",
    "training.max_steps": "12",
    "training.log_every_steps": "1",
    "training.checkpoint.every_steps": "4",
    "training.validation.walk_rows": "4",
    "capture.kv_cache_gib": "0.5",
    "evaluation.kv_cache_gib": "0.5",
    "evaluation.max_prompts": "12",
    "evaluation.max_new_tokens": "24",
    "gate": "{al_floor: 1.0, min_prompts: 8, speed: report}",
}


def command(home: Path, *arguments: str, **overrides: str) -> tuple[list[str], dict[str, str]]:
    sets = [part for key, value in {**SMALL, **overrides}.items() for part in ("--set", f"{key}={value}")]
    argv = [sys.executable, "-m", "flows.cli", *arguments[:1], str(RECIPE), *arguments[1:], *sets]
    return argv, child_environment(home)


def run(home: Path, *arguments: str, **overrides: str) -> subprocess.CompletedProcess[str]:
    argv, env = command(home, *arguments, **overrides)
    return subprocess.run(argv, env=env, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)


def engines_of(home: Path) -> list[str]:
    """Command lines of live processes that bear this home's name or its supervisor's mark."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        try:
            line = " ".join(process.info["cmdline"] or [])
            if str(home) in line or process.environ().get("DRAFTSMITH_HOME") == str(home):
                found.append(f"{process.pid}: {line}")
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def start(home: Path, log: Path, *arguments: str, **overrides: str) -> subprocess.Popen[bytes]:
    """The command in the background, its output in `log`."""
    argv, env = command(home, *arguments, **overrides)
    with log.open("ab") as stream:
        return subprocess.Popen(argv, env=env, cwd=ROOT, stdout=stream, stderr=stream)


def await_text(log: Path, text: str, process: subprocess.Popen[bytes], timeout_s: float = 600) -> None:
    """Return when the log holds the text; fail when the process ends or the time is up."""
    deadline = time.monotonic() + timeout_s
    while text not in log.read_text(errors="replace"):
        assert process.poll() is None, f"ended before {text!r}:\n{log.read_text(errors='replace')[-3000:]}"
        assert time.monotonic() < deadline, f"no {text!r} in time"
        time.sleep(0.1)


def await_silence(home: Path, timeout_s: float = 30) -> None:
    """Return when no process of this state root is left; fail after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while left := engines_of(home):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
