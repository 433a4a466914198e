"""Files of a verifier that no parser gets to the end of."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest

from speculators_core.errors import VerifierError
from speculators_core.verifier.facts import read_config
from speculators_core.verifier.files import open_verifier
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
