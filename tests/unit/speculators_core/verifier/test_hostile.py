"""Files of a verifier that no parser gets to the end of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsspec
import pytest

from speculators_core.errors import VerifierError
from speculators_core.verifier.facts import read_config, read_facts
from speculators_core.verifier.files import LocalFiles, open_verifier
from speculators_core.verifier.fingerprint import describe, fingerprint
from speculators_core.verifier.weights import parse_index

HALF_A_PAIR = b'{"foo": "\\ud800"}'
UNREADABLE = [b"[" * 200_000, b'{"vocab_size": ' + b"9" * 6000 + b"}", b"\xff"]


@pytest.mark.parametrize("content", UNREADABLE)
def test_json_beyond_reading_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(VerifierError, match=r"config\.json"):
        read_config(tmp_path)
    with pytest.raises(VerifierError, match="not a safetensors index"):
        parse_index(content, "index")


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer_config.json", "adapter_config.json"]
)
@pytest.mark.parametrize(
    "content",
    [*UNREADABLE, b'{"a":' * 900 + b"1" + b"}" * 900, b'{"a":' + b"[" * 900 + b"]" * 900 + b"}", HALF_A_PAIR, b"[1]"],
    ids=["unclosed", "digits", "bytes", "objects", "arrays", "surrogate", "no object"],
)
def test_json_that_could_not_be_hashed_is_named(verifier: Path, name: str, content: bytes) -> None:
    (verifier / name).write_bytes(content)
    with pytest.raises(VerifierError, match=rf"{name} (is not valid JSON|holds no JSON object)"):
        fingerprint(verifier, home=None)


@pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates/tool_use.jinja"])
def test_a_template_in_another_encoding_is_named(verifier: Path, name: str) -> None:
    (verifier / name).parent.mkdir(exist_ok=True)
    (verifier / name).write_bytes("{{ 'é' }}".encode("latin-1"))
    with pytest.raises(VerifierError, match=rf"{name} is not UTF-8"):
        fingerprint(verifier, home=None)


@pytest.mark.parametrize(
    "template", [["x"], [{"name": "default"}], [{"name": 1, "template": "x"}], 5, {"default": "x"}]
)
def test_a_template_of_another_form_is_named(verifier: Path, template: Any) -> None:
    (verifier / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(VerifierError, match=r"chat_template of .*tokenizer_config\.json is neither"):
        fingerprint(verifier, home=None)


def test_a_nested_model_that_is_none_leaves_the_outer_ones_shape(verifier: Path) -> None:
    config = json.loads((verifier / "config.json").read_text())
    (verifier / "config.json").write_text(json.dumps(config | {"text_config": None, "llm_config": 5}))
    assert describe(LocalFiles(verifier, home=None)).shape["hidden_size"] == config["hidden_size"]


@pytest.mark.parametrize(
    "changes",
    [
        {"rms_norm_eps": "small"},
        {"rms_norm_eps": 10**400},
        {"eos_token_id": "end"},
        {"eos_token_id": [{}]},
        {"architectures": 5},
        {"architectures": [5]},
        {"rope_scaling": "linear"},
        {"num_key_value_heads": [2]},
        {"num_experts": "many"},
    ],
    ids=json.dumps,
)
def test_a_value_of_another_type_is_named(verifier: Path, changes: dict[str, Any]) -> None:
    config = json.loads((verifier / "config.json").read_text())
    (verifier / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(VerifierError, match=r"config\.json .*holds what no model has: "):
        read_facts(verifier)


def test_an_object_whose_copy_would_lie_elsewhere_is_refused(tmp_path: Path) -> None:
    files = fsspec.filesystem("memory")
    files.pipe_file("/hostile/model/config.json", b"{}")
    files.pipe_file("/hostile/model/../../../.bashrc", b"rm -rf")
    with pytest.raises(VerifierError, match=r"would lie elsewhere: \.\./\.\./\.\./\.bashrc"):
        open_verifier("memory://hostile/model", home=tmp_path / "home").local(weights=True)


def stored(header: Any, num_bytes: int = 12) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(num_bytes)


def tensor(begin: Any, end: Any, **other: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [begin, end], **other}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ((2**63).to_bytes(8, "little") + b"{}", "claims a header of 9223372036854775808 bytes"),
        ((90_000_000).to_bytes(8, "little") + b"{}xx", "Extra data"),
        (b"", "Expecting value"),
        ((8).to_bytes(8, "little") + b"not json", "Expecting value"),
        ((200_000).to_bytes(8, "little") + b"[" * 200_000, "recursion"),
        (stored([1]), "no JSON object"),
        (stored({"a": tensor(0, 8), "b": tensor(4, 12)}), "the bytes of b overlap others"),
        (stored({"a": tensor(8, 0)}), "the bytes of a overlap others"),
        (stored({"a": tensor(0, 8), "b": tensor(8, 1 << 40)}), "ends before its last tensor"),
        (stored({"a": tensor(-8, 0)}), "a: Input should be greater than or equal to 0"),
        (stored({"a": tensor(0, 8, shape=["x"])}), "a: "),
        (stored({"a": 3}), "a: "),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_header_that_cannot_be_is_told_before_anything_is_hashed(verifier: Path, content: bytes, told: str) -> None:
    (verifier / "model.safetensors").write_bytes(content)
    with pytest.raises(VerifierError, match=rf"model\.safetensors is torn or not safetensors: .*{told}"):
        fingerprint(verifier, home=None)
