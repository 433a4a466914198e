from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from speculators_core import registry
from speculators_core.algorithms._blocks.mask_token import resolve_mask_token
from speculators_core.drafts import algorithm_of
from speculators_core.errors import ConfigError
from speculators_core.types import DraftPlan, no_mask
from speculators_core.verifier.facts import read_facts
from tests.unit.speculators_core.algorithms.tiny import VOCAB, write_verifier


def verifier(directory: Path, words: int, special: list[str], template: str = "", **named: Any) -> Path:
    write_verifier(directory)
    tokenizer = Tokenizer(WordLevel({f"w{index}": index for index in range(words)}, unk_token="w0"))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)
    fast.add_special_tokens({"additional_special_tokens": special})
    fast.chat_template = template
    fast.save_pretrained(directory)
    return directory


def chosen(directory: Path, asked: int | None = None) -> int:
    return resolve_mask_token(directory, read_facts(directory), asked)


def test_an_id_that_the_tokenizer_leaves_free_comes_first(tmp_path: Path) -> None:
    assert chosen(verifier(tmp_path, VOCAB - 6, ["<a>", "<b>"])) == VOCAB - 4


def test_the_tokenizers_own_mask_token_beats_all(tmp_path: Path) -> None:
    assert chosen(verifier(tmp_path, VOCAB - 6, ["<a>"], mask_token="w7")) == 7


def test_in_a_full_vocabulary_an_idle_special_token_is_taken(tmp_path: Path) -> None:
    directory = verifier(tmp_path, VOCAB - 3, ["<turn>", "<idle>", "<end>"], "{{ '<turn>' }}", eos_token="<end>")
    idle = chosen(directory)
    assert chosen(directory, idle) == idle
    for token, why in ((3, "text is made of"), (VOCAB, "outside"), (-1, "outside")):
        with pytest.raises(ConfigError, match=f"mask_token_id.*{why}"):
            chosen(directory, token)
    written = {VOCAB - 3, VOCAB - 2, VOCAB - 1} - {idle}
    refused = 0
    for token in written:
        try:
            chosen(directory, token)
        except ConfigError as error:
            refused += "chat template" in str(error)
    assert refused == 1


@pytest.mark.parametrize(
    "kind", [name for name in registry.names() if registry.resolve(name).mask_token is not no_mask]
)
def test_a_recipe_may_not_take_what_an_existing_draft_may_have(tmp_path: Path, kind: str) -> None:
    directory = verifier(tmp_path, VOCAB - 3, ["<turn>", "<idle>", "<end>"], "{{ '<turn>' }}", eos_token="<end>")
    algorithm, config = algorithm_of({"kind": kind, "mask_token_id": 3})
    with pytest.raises(ConfigError, match="text is made of"):
        algorithm.check(config, DraftPlan(directory, VOCAB, None, row_tokens=64, allow_unservable=True))
    assert algorithm.build(config, directory, None, 0).mask_token_id == 3


def test_padding_and_end_are_the_last_resort(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    full = verifier(tmp_path / "full", VOCAB - 1, ["<end>"], eos_token="<end>", pad_token="<end>")
    assert chosen(full) == VOCAB - 1
    assert "padding token" in caplog.text
    assert chosen(write_verifier(tmp_path / "no tokenizer", pad_token_id=5)) == 5
    assert chosen(write_verifier(tmp_path / "only an end")) == 2


def test_nothing_left_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.mask_token_id"):
        chosen(write_verifier(tmp_path, eos_token_id=None))
