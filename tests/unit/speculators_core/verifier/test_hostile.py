"""Files of a verifier that no parser gets to the end of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsspec
import pytest

from speculators_core.errors import VerifierError
from speculators_core.verifier.facts import read_config
from speculators_core.verifier.files import open_verifier
from speculators_core.verifier.fingerprint import fingerprint
from speculators_core.verifier.weights import parse_index


@pytest.mark.parametrize("content", [b"[" * 200_000, b'{"vocab_size": ' + b"9" * 6000 + b"}", b"\xff"])
def test_json_beyond_reading_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(VerifierError, match=r"config\.json"):
        read_config(tmp_path)
    with pytest.raises(VerifierError, match="not a safetensors index"):
        parse_index(content, "index")


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
