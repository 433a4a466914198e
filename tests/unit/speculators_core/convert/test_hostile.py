"""Torn and hostile checkpoints: each key and each tensor in turn may be anything, and is taken or refused in words."""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import save_file

from speculators_core.convert import convert, convert_to
from speculators_core.convert.convert import read_foreign
from speculators_core.convert.fetch import fetch_verifier
from speculators_core.convert.foreign import to_foreign
from speculators_core.convert.options import ConvertOptions
from speculators_core.convert.source import Source
from speculators_core.data.vocabulary import given_vocabulary
from speculators_core.errors import ConfigError, DataError, DraftsmithError, FormatError, StoreError
from tests.unit.speculators_core.algorithms.tiny import LAYERS, write_verifier
from tests.unit.speculators_core.convert import foreign_drafts as foreign

Keys = tuple[str, ...]
CHECKPOINTS = {
    "safeai": (foreign.eagle3_config(), foreign.filled(foreign.eagle3_shapes()) | foreign.tables()),
    "peagle": (
        foreign.eagle3_config(num_hidden_layers=2, mask_token_id=3),
        foreign.filled(foreign.peagle_shapes()) | foreign.tables(),
    ),
    "zlab": (foreign.block_config(dflash_config=foreign.SELECTING), foreign.filled(foreign.selecting_shapes())),
    "deepspec": (foreign.deepspec_config(), foreign.filled(foreign.corrected_shapes())),
}
VALUES: list[Any] = [None, -1, 0, 10**15, "x", [], [None], {"a": 1}, float("nan"), True]
UNWRITTEN: list[Keys] = [  # read where they are written, which the checkpoints above don't
    ("eagle_config",),
    ("eagle_config", "eagle_aux_hidden_state_layer_ids"),
    ("eagle_config", "norm_before_fc"),
    ("eagle_aux_hidden_state_layer_ids",),
    ("target_hidden_size",),
    ("rope_parameters",),
    ("rope_scaling", "rope_type"),
    ("dflash_config", "causal"),
    ("dflash_config", "draft_vocab_size"),
    ("speculators_config",),
    ("speculators_config", "verifier"),
    ("speculators_config", "verifier", "name_or_path"),
    ("pad_token_id",),
]


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_verifier(tmp_path_factory.mktemp("verifier"))


def source_of(layout: str, directory: Path, verifier: Path) -> Path:
    """A checkpoint in that layout; `ours` is what a conversion writes."""
    if layout != "ours":
        return foreign.write(directory / layout, *CHECKPOINTS[layout])
    theirs = source_of("safeai", directory, verifier)
    convert(Source(theirs), directory / layout, verifier, "org/verifier", ConvertOptions())
    return directory / layout


def keys_of(config: Mapping[str, Any], above: Keys = ()) -> Iterator[Keys]:
    for key, value in config.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from keys_of(value, (*above, key))


def changed(config: Mapping[str, Any], keys: Keys, value: Any) -> dict[str, Any]:
    """The config with one value in the place of another."""
    found: dict[str, Any] = copy.deepcopy(dict(config))
    node = found
    for key in keys[:-1]:
        if not isinstance(node.get(key), dict):
            node[key] = {}
        node = node[key]
    node[keys[-1]] = value
    return found


def read(directory: Path, verifier: Path) -> None:
    """All that `convert` and `adopt` do with a checkpoint before they write; refusals are what is wanted."""
    with contextlib.suppress(DraftsmithError):
        source = Source(directory)
        fetch_verifier(None, source, home=directory)
        _, draft, _ = read_foreign(source, verifier, None, ConvertOptions())
        to_foreign(draft, "sglang", LAYERS)


@pytest.mark.parametrize("layout", ["ours", *CHECKPOINTS])
def test_no_value_of_any_key_gets_past_the_readers_unseen(layout: str, verifier: Path, tmp_path: Path) -> None:
    directory = source_of(layout, tmp_path, verifier)
    config = json.loads((directory / "config.json").read_text())
    for keys in dict.fromkeys((*keys_of(config), *UNWRITTEN)):
        for value in VALUES:
            (directory / "config.json").write_text(json.dumps(changed(config, keys, value)))
            read(directory, verifier)


@pytest.mark.parametrize("layout", ["ours", *CHECKPOINTS])
def test_no_tensor_of_another_form_gets_past_them(layout: str, verifier: Path, tmp_path: Path) -> None:
    directory = source_of(layout, tmp_path, verifier)
    _, tensors = CHECKPOINTS.get(layout, CHECKPOINTS["safeai"])
    for name in tensors:
        for other in (
            torch.tensor(1.0),
            torch.zeros(0),
            torch.zeros(1, 2, 3),
            torch.full(tensors[name].shape, 2**62),
            torch.zeros(tensors[name].shape, dtype=torch.complex64),
        ):
            save_file({**tensors, name: other}, directory / "model.safetensors")
            read(directory, verifier)


@pytest.mark.parametrize(
    "content", [b"[" * 200_000, b'{"a":' * 100_000, b"\xff", b"[]", b'{"a": ' + b"9" * 6000 + b"}"]
)
def test_a_config_that_no_parser_gets_through(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(FormatError, match=r"config\.json"):
        _ = Source(tmp_path).config


@pytest.mark.parametrize(
    ("keys", "value", "says"),
    [
        (("num_hidden_layers",), 10**15, "num_hidden_layers: Input should be less"),
        (("hidden_size",), "x", "hidden_size: Input should be a valid integer"),
        (("eagle_config",), [], "eagle_config"),
        (("rope_theta",), float("nan"), "rope_theta: Input should be a finite number"),
    ],
)
def test_the_key_is_named(keys: Keys, value: Any, says: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(changed(foreign.eagle3_config(), keys, value)))
    with pytest.raises(FormatError, match=says) as caught:
        _ = Source(tmp_path).config
    assert caught.value.mend


@pytest.mark.parametrize("content", [b"", b"junk", b"\x80\x02" + b"(" * 100_000, b"PK\x03\x04" + b"\0" * 50])
def test_bytes_that_are_no_pickle_are_refused_without_torchs_advice(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(FormatError, match="more than tensors, or is torn") as caught:
        _ = Source(tmp_path, allow_bin=True).names
    assert "weights_only" not in str(caught.value)


@pytest.mark.parametrize("outside", ["../other/model.safetensors", "/etc/passwd"])
def test_an_index_may_only_name_files_of_its_own(outside: str, tmp_path: Path) -> None:
    source = foreign.write(tmp_path / "theirs", *CHECKPOINTS["safeai"])
    foreign.write(tmp_path / "other", {}, {})
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"fc.weight": outside}}))
    with pytest.raises(FormatError, match="none of its files"):
        Source(source).tensors()


def test_files_that_an_index_names_and_that_are_torn(tmp_path: Path) -> None:
    source = foreign.write(tmp_path / "theirs", *CHECKPOINTS["safeai"])
    (source / "model.safetensors").write_bytes(b"\1\2")
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    with pytest.raises(FormatError, match=r"model\.safetensors is torn"):
        Source(source).tensors()


def indexed(directory: Path, weight_map: Mapping[str, str]) -> Path:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict(weight_map)}))
    return directory


def test_an_index_that_contradicts_its_files_is_refused(verifier: Path, tmp_path: Path) -> None:
    config, tensors = CHECKPOINTS["safeai"]
    source, told = foreign.write(tmp_path / "theirs", config, tensors), dict.fromkeys(tensors, "model.safetensors")
    read_foreign(Source(indexed(source, told)), verifier, None, ConvertOptions())
    first = min(told)
    less = {name: file for name, file in told.items() if name != first}
    for wrong, says in (
        ({"zz": "model.safetensors"}, "names, where there is none, zz in model.safetensors; it leaves out"),
        ({**told, "zz": "model.safetensors"}, "contradicts the weights: it names, where there is none, zz"),
        (less, f"contradicts the weights: it leaves out {first} in model"),
    ):
        with pytest.raises(FormatError, match=says) as caught:
            read_foreign(Source(indexed(source, wrong)), verifier, None, ConvertOptions())
        assert caught.value.mend


def test_the_digest_covers_what_is_read_and_nothing_else(verifier: Path, tmp_path: Path) -> None:
    config, tensors = CHECKPOINTS["safeai"]
    source = foreign.write(tmp_path / "theirs", config, tensors)
    (source / "sub").mkdir()
    (source / "model.safetensors").rename(source / "sub" / "m.safetensors")
    indexed(source, dict.fromkeys(tensors, "sub/m.safetensors"))
    read_foreign(Source(source), verifier, None, ConvertOptions())
    (source / "optimizer.bin").write_bytes(b"nobody reads this")
    first = Source(source).digest()
    (source / "optimizer.bin").unlink()
    assert Source(source).digest() == first
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, source / "sub" / "m.safetensors")
    second = Source(source).digest()
    save_file(tensors, source / "sub" / "n.safetensors")
    indexed(source, dict.fromkeys(tensors, "sub/n.safetensors"))
    third = Source(source).digest()
    (source / "mask_embedding.pt").write_bytes(b"read beside the weights")
    assert len({first, second, third, Source(source).digest()}) == 4


def test_a_pipe_is_no_config(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(FormatError, match=r"holds no config\.json"):
        _ = Source(tmp_path).config


@pytest.mark.parametrize("layout", ["draftsmith", "sglang"])
def test_a_disk_that_fills_up_leaves_nothing_behind(
    layout: str, verifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = Source(source_of("safeai", tmp_path, verifier)), tmp_path / "made" / "draft"

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(StoreError, match="the disk is full while writing"):
        if layout == "draftsmith":
            convert(source, target, verifier, "org/verifier", ConvertOptions())
        else:
            convert_to(layout, source, target, verifier, ConvertOptions())
    assert list((tmp_path / "made").iterdir()) == []


def test_what_a_speculators_checkpoint_says_is_not_overruled(verifier: Path, tmp_path: Path) -> None:
    source = Source(source_of("ours", tmp_path, verifier))
    for options in (ConvertOptions(aux_layers=(1, 2, 3)), ConvertOptions(mask_token_id=3)):
        with pytest.raises(ConfigError, match="leave the option out"):
            read_foreign(source, verifier, None, options)
    stated = tuple(source.config["eagle_aux_hidden_state_layer_ids"])
    _, draft, _ = read_foreign(source, verifier, None, ConvertOptions(aux_layers=stated))
    assert draft.config["eagle_aux_hidden_state_layer_ids"] == list(stated)


@pytest.mark.parametrize("table", [numpy.array(["a"]), numpy.array(["2020-01-01"], dtype="datetime64[D]")])
def test_a_vocabulary_of_texts_is_none(table: Any, tmp_path: Path) -> None:
    numpy.save(tmp_path / "d2t.npy", table)
    with pytest.raises(DataError, match="not whole numbers or truth values"):
        given_vocabulary(tmp_path / "d2t.npy", 100)
