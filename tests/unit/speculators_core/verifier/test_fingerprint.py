"""A fingerprint follows content, and names the part that changed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from speculators_core.errors import VerifierError
from speculators_core.verifier.fingerprint import PARTS, capture_key, fingerprint
from speculators_core.verifier.hashes import HashCache


def edit(name: str, **changes: object) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        file = directory / name
        content = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(content | changes))

    return apply


CHANGES: dict[str, Callable[[Path], None]] = {
    "weights": lambda v: save_file({"model.norm.weight": torch.zeros(4)}, v / "model.safetensors"),
    "config": edit("config.json", rope_theta=1.0),
    "generation_config": edit("generation_config.json", eos_token_id=[2, 5]),
    "tokenizer": edit("tokenizer.json", model={"type": "BPE"}),
    "chat_template": edit("tokenizer_config.json", chat_template="{{ messages }}!"),
    "quantisation": edit("config.json", quantization_config={"quant_method": "awq"}),
    "adapters": edit("adapter_config.json", r=8),
}


@pytest.mark.parametrize("part", PARTS)
def test_each_part_is_told_apart(verifier: Path, part: str) -> None:
    before = fingerprint(verifier, home=None)
    CHANGES[part](verifier)
    after = fingerprint(verifier, home=None)
    assert after.digest != before.digest and after.changed_parts(before) == (part,)


def test_place_names_and_writers_leave_no_trace(verifier: Path, tmp_path: Path) -> None:
    before = fingerprint(verifier, home=None)
    copy = tmp_path / "elsewhere" / "snapshot"
    shutil.copytree(verifier, copy)
    edit("config.json", _name_or_path="somewhere/else", transformers_version="9.9")(copy)
    (copy / "README.md").write_text("hello")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(dict(reversed(config.items())), indent=4))
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    shutil.move(copy / "model.safetensors", blobs / "abc")
    (copy / "model.safetensors").symlink_to(blobs / "abc")  # as hub snapshots do
    assert fingerprint(copy, home=None) == before


def test_template_kwargs_and_jinja_files_count(verifier: Path) -> None:
    before = fingerprint(verifier, home=None)
    kwargs = fingerprint(verifier, home=None, template_kwargs={"enable_thinking": False})
    assert kwargs.changed_parts(before) == ("chat_template",)
    (verifier / "chat_template.jinja").write_text("{{ messages }}")
    assert fingerprint(verifier, home=None).parts == before.parts, "the same template, kept in another file"
    (verifier / "chat_template.jinja").write_text("{{ messages }}?")
    assert fingerprint(verifier, home=None).changed_parts(before) == ("chat_template",)


def test_hashes_are_remembered_and_a_change_is_seen(tmp_path: Path) -> None:
    file, cache = tmp_path / "weights", tmp_path / "home" / "hash-cache.json"
    file.write_bytes(b"one")
    os.utime(file, (1, 1))
    young = HashCache(cache)
    first = young.of(file)
    young.save()
    assert not cache.exists(), "a file changed a moment ago could change again unseen"

    key = f"{file.stat().st_dev}:{file.stat().st_ino}:3:{file.stat().st_mtime_ns}:{file.stat().st_ctime_ns}"
    cache.parent.mkdir()
    remembered = "5" * 64  # only what looks like a digest is believed
    cache.write_text(json.dumps({key: remembered}))
    assert HashCache(cache).of(file) == remembered
    file.write_bytes(b"two")
    os.utime(file, (1, 1))  # same size and mtime; the inode's own time tells
    assert HashCache(cache).of(file) not in (remembered, first)
    cache.write_text("{torn")
    assert HashCache(cache).of(file)


def test_capture_key_holds_everything_that_states_depend_on(verifier: Path) -> None:
    fp = fingerprint(verifier, home=None)
    keys = {
        capture_key(fp, "runtime", (2, 15, 27, 30), "bfloat16"),
        capture_key(fp, "other", (2, 15, 27, 30), "bfloat16"),
        capture_key(fp, "runtime", (2, 15, 30), "bfloat16"),
        capture_key(fp, "runtime", (2, 15, 27, 30), "float16"),
    }
    assert len(keys) == 4


def test_not_a_model_directory(tmp_path: Path) -> None:
    with pytest.raises(VerifierError):
        fingerprint(tmp_path, home=None)
