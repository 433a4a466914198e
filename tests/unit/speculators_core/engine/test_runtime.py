from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from pydantic import ValidationError

from speculators_core.config import Recipe, validate
from speculators_core.engine.runtime import Runtime, RuntimeInfo, probe_runtime
from speculators_core.errors import ConfigError, EngineError

INFO = RuntimeInfo(vllm="1", build="b", device="cpu", model_runner="v1", torch="t", transformers="f")


def interpreter(root: Path, script: str) -> Path:
    """An executable that answers in place of an interpreter, with a site-packages beside it."""
    path = root / "bin" / "python"
    path.parent.mkdir(parents=True)
    path.write_text("#!/bin/sh\n" + script)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    (root / "lib" / "python3" / "site-packages" / "vllm-1.dist-info").mkdir(parents=True)
    return path


def test_a_runtime_is_an_interpreter_or_a_url() -> None:
    for wrong in ({}, {"python": "/p", "url": "http://h"}):
        with pytest.raises(ValidationError, match="exactly one"):
            Runtime(**wrong)


@pytest.mark.parametrize("url", ["http://me:hunter2@gpu:8000", "http://gpu:8000?api_key=hunter2"])
def test_a_url_holds_no_secret(url: str) -> None:
    with pytest.raises(ConfigError, match="api_key_variable") as refused:
        validate(Recipe, {"runtime": {"url": url}}, where="recipe")
    assert "hunter2" not in str(refused.value)


def test_the_key_holds_what_decision_1_names() -> None:
    assert len(INFO.key) == 64
    for field in ("vllm", "build", "device", "model_runner"):
        assert INFO.model_copy(update={field: "other"}).key != INFO.key
    for field in ("torch", "transformers"):
        assert INFO.model_copy(update={field: "other"}).key == INFO.key


def test_an_answer_is_kept_until_something_is_installed(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    python = interpreter(
        tmp_path / "env", f"echo x >> {calls}\necho noise\necho 'DRAFTSMITH{INFO.model_dump_json()}'\n"
    )
    runtime, home = Runtime(python=str(python)), tmp_path / "home"
    assert probe_runtime(runtime, home=home) == INFO
    assert probe_runtime(runtime, home=home) == INFO
    assert calls.read_text() == "x\n"
    assert len(list((home / "runtimes").iterdir())) == 1
    os.utime(tmp_path / "env" / "lib" / "python3" / "site-packages" / "vllm-1.dist-info", (1, 1))
    probe_runtime(runtime, home=home)
    assert calls.read_text() == "x\nx\n"


def test_a_missing_interpreter_teaches(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no interpreter") as raised:
        probe_runtime(Runtime(python=str(tmp_path / "python")))
    assert "make setup" in str(raised.value)


def test_an_interpreter_without_vllm_teaches(tmp_path: Path) -> None:
    python = interpreter(tmp_path, 'PYTHONPATH= exec /usr/bin/python3 -S "$@"\n')  # has neither vLLM nor torch
    with pytest.raises(EngineError) as raised:
        probe_runtime(Runtime(python=str(python)))
    assert raised.value.what.endswith("no vLLM in this interpreter\n  ModuleNotFoundError: No module named 'vllm'")
    assert "an interpreter that has vLLM, e.g. .venv-vllm/bin/python" in str(raised.value.mend)


def test_a_url_where_nobody_answers_teaches() -> None:
    with pytest.raises(EngineError, match="no vLLM server answers"):
        probe_runtime(Runtime(url="http://127.0.0.1:9"))
