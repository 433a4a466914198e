"""A broken tokenizer is an error in words, whatever the libraries that read it raise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from speculators_core.errors import VerifierError
from speculators_core.verifier.tokenizer import load_tokenizer

WHOLE: dict[str, Any] = {
    "version": "1.0",
    "added_tokens": [],
    "pre_tokenizer": {"type": "WhitespaceSplit"},
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]},
}


def write(directory: Path, tokenizer: object, **config: object) -> Path:
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | config
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def test_a_whole_one_loads(tmp_path: Path) -> None:
    assert load_tokenizer(write(tmp_path, WHOLE))("ab")["input_ids"] == [2]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"pre_tokenizer": {"type": "Nope"}}, "tokenizer.json: data did not match any variant"),
        ({"model": WHOLE["model"] | {"merges": [["b", "b"]]}}, "tokenizer.json: .*out of vocabulary"),
        ({"model": WHOLE["model"] | {"vocab": {"a": -1}}}, "tokenizer.json: "),
        ({"model": WHOLE["model"] | {"merges": 5}}, "tokenizer.json: "),
        ({"model": None}, "tokenizer.json: "),
        ({"added_tokens": [{"id": 5}]}, "tokenizer.json: "),
        ({"normalizer": {"type": "Replace", "pattern": {"Regex": "("}, "content": ""}}, "tokenizer.json: "),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(VerifierError, match=f"the tokenizer of .* cannot be loaded: {told}") as caught:
        load_tokenizer(write(tmp_path, WHOLE | changes))
    assert caught.value.mend and "tokenizer files" in caught.value.mend


@pytest.mark.parametrize(
    "config",
    [{"added_tokens_decoder": {"x": 1}}, {"eos_token": 5}, {"tokenizer_class": 5}],
)
def test_a_broken_configuration_of_it_is_an_error_too(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(VerifierError, match=f"the tokenizer of {tmp_path} cannot be loaded: "):
        load_tokenizer(write(tmp_path, WHOLE, **config))
