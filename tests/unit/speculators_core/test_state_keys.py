"""What decides states is in their keys and places: two recipes whose states differ never share them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from speculators_core.config import Recipe
from speculators_core.engine.runtime import RuntimeInfo
from speculators_core.errors import ConfigError
from speculators_core.run import Run
from speculators_core.stages.states import records_of
from speculators_core.stages.streaming import station
from tests.unit.speculators_core.algorithms.tiny import write_verifier

INFO = RuntimeInfo(vllm="0.32.0", build="b", device="cpu", model_runner="v1", torch="t", transformers="f")


def runtime(tmp_path: Path, vllm: str) -> dict[str, str]:
    """An interpreter that says that it has this vLLM."""
    python = tmp_path / vllm / "bin" / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    info = INFO.model_copy(update={"vllm": vllm})
    python.write_text(f"#!/bin/sh\necho 'DRAFTSMITH{info.model_dump_json()}'\n")
    python.chmod(0o755)
    return {"name": f"of {vllm}", "python": str(python)}


def run_with(tmp_path: Path, **changes: Any) -> Run:
    if not (tmp_path / "verifier").exists():
        write_verifier(tmp_path / "verifier")
        (tmp_path / "verifier" / "tokenizer.json").write_text("{}")
        (tmp_path / "verifier" / "chat_template.jinja").write_text("{{ messages }}")
    recipe = {
        "name": "tiny", "deployment": "tiny", "verifier": {"path": str(tmp_path / "verifier")},
        "runtime": runtime(tmp_path, "0.32.0"), "data": {"sources": ["nowhere.jsonl"]},
        "algorithm": {"kind": "eagle3", "aux_layers": [1, 2, 3]}, **changes,
    }  # fmt: skip
    return Run(Recipe.model_validate(recipe), tmp_path / "home")


def test_records_of_replies_lie_apart_where_they_differ(tmp_path: Path) -> None:
    plain, lossy = run_with(tmp_path), run_with(tmp_path, capture={"codec": "fp8"})
    other = run_with(tmp_path, algorithm={"kind": "eagle3", "aux_layers": [1, 2, 4]})
    assert len({records_of(run, "k" * 64) for run in (plain, lossy, other)}) == 3
    assert records_of(plain, "k" * 64) == records_of(run_with(tmp_path, capture={"concurrency": 7}), "k" * 64)


def test_an_engine_of_another_vllm_than_the_states_count_as_is_refused(tmp_path: Path) -> None:
    engines = [{"runtime": runtime(tmp_path, version)} for version in ("0.32.0", "0.33.0")]
    run = run_with(tmp_path, hidden_states={"engines": engines})
    same, newer = run.recipe.hidden_states.engines
    assert station(run, run.recipe.capture, same, tmp_path, 64).runtime == same.runtime
    with pytest.raises(
        ConfigError, match=r"'of 0\.33\.0' .* vLLM 0\.33\.0 .* vLLM 0\.32\.0 [\s\S]*mend: .*capture\.runtime"
    ):
        station(run, run.recipe.capture, newer, tmp_path, 64)
    moved = run_with(tmp_path, hidden_states={"engines": engines}, capture={"runtime": runtime(tmp_path, "0.33.0")})
    station(moved, moved.recipe.capture, newer, tmp_path, 64)
