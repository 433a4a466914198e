"""A small verifier that is complete enough to be fingerprinted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from .test_facts import LLAMA


@pytest.fixture
def verifier(tmp_path: Path) -> Path:
    directory = tmp_path / "verifier"
    directory.mkdir()
    save_file({"model.norm.weight": torch.ones(4)}, directory / "model.safetensors")
    for name, content in {
        "config.json": LLAMA,
        "generation_config.json": {"eos_token_id": 2, "transformers_version": "5.0"},
        "tokenizer.json": {"model": {}},
        "tokenizer_config.json": {"tokenizer_class": "X", "chat_template": "{{ messages }}"},
    }.items():
        (directory / name).write_text(json.dumps(content))
    return directory
