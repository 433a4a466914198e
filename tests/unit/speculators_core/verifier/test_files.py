"""Whichever road a verifier's files come by, the same bytes have the same fingerprint."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import save_file

from speculators_core.errors import VerifierError
from speculators_core.verifier.facts import read_facts
from speculators_core.verifier.files import LocalFiles, open_verifier
from speculators_core.verifier.fingerprint import describe, describe_location, fingerprint, recall

from .hub_server import Hub, serve_hub

MODEL = "garden/tiny"


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


@pytest.fixture
def hub(verifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with serve_hub() as served:
        served.models[MODEL] = contents(verifier)
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        yield served


def test_a_hub_id_agrees_with_a_local_copy_and_fetches_no_weights(hub: Hub, verifier: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    local = fingerprint(verifier, home=None)
    assert describe_location(MODEL, home=home).fingerprint == local
    assert not hub.fetched("model.safetensors") and hub.fetched("config.json")
    hub.asked.clear()
    assert describe_location(f"{MODEL}@{hub.commit(MODEL)}", home=home).fingerprint == local
    assert hub.asked == [], "a commit never changes: nothing is asked again"
    snapshot = open_verifier(MODEL, home=home).local(weights=True)
    assert fingerprint(snapshot, home=None) == local and (snapshot / "model.safetensors").is_file()


def test_a_new_commit_of_a_branch_is_seen(hub: Hub, verifier: Path, tmp_path: Path) -> None:
    before = describe_location(MODEL, home=tmp_path / "home")
    save_file({"model.norm.weight": torch.zeros(4)}, verifier / "model.safetensors")
    hub.models[MODEL] = contents(verifier)
    after = describe_location(MODEL, home=tmp_path / "home", revision="main")
    assert after.fingerprint.changed_parts(before.fingerprint) == ("weights",)
    assert after.fingerprint == fingerprint(verifier, home=None)


def test_facts_need_no_weights_of_the_hub(hub: Hub, tmp_path: Path) -> None:
    directory = open_verifier(MODEL, home=tmp_path / "home").local(weights=False)
    assert read_facts(directory).hidden_size == 64
    assert not hub.fetched("model.safetensors")


@pytest.mark.parametrize(
    ("location", "words"),
    [
        ("garden/nothing", "neither a directory here nor a model on the hub"),
        (f"{MODEL}@v9", "no revision"),
        ("no-such-directory", "does not exist"),
        ("memory://nowhere/at/all", "no config.json"),
        ("gopher://old/model", "cannot be used"),
    ],
)
def test_what_is_not_there_is_said(hub: Hub, tmp_path: Path, location: str, words: str) -> None:
    with pytest.raises(VerifierError, match=words) as caught:
        describe_location(location, home=tmp_path / "home")
    assert caught.value.mend


def test_a_hub_that_is_away_is_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(VerifierError, match="the hub failed at looking it up"):
        describe_location(MODEL, home=tmp_path / "home")


def test_a_url_agrees_with_a_local_copy(verifier: Path, tmp_path: Path) -> None:
    files = fsspec.filesystem("memory")
    for name, content in contents(verifier).items():
        files.pipe_file(f"/bucket/model/{name}", content)
    found = describe_location("memory://bucket/model", home=tmp_path / "home")
    assert found.fingerprint == fingerprint(verifier, home=None)
    copy = open_verifier("memory://bucket/model", home=tmp_path / "home").local(weights=True)
    assert fingerprint(copy, home=None) == found.fingerprint
    assert json.loads((tmp_path / "home" / "hash-cache.json").read_text()), "objects are remembered too"


def test_of_two_that_fetch_a_verifier_at_once_each_has_it_whole(
    verifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = fsspec.filesystem("memory")
    for name, content in contents(verifier).items():
        files.pipe_file(f"/bucket/shared/{name}", content)
    fetch = type(files).get_file

    def fetch_slowly(*given: Any) -> None:
        fetch(*given)
        time.sleep(0.1)

    monkeypatch.setattr(type(files), "get_file", fetch_slowly)
    both = [open_verifier("memory://bucket/shared", home=tmp_path / "home") for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda one: one.local(weights=True), both)
    assert first == second and contents(first) == contents(verifier)


class Rewritten(LocalFiles):
    """A directory that somebody writes to while it is hashed."""

    def sha256(self, names: Sequence[str]) -> list[str]:
        found = super().sha256(names)
        (self._directory / "generation_config.json").write_text('{"eos_token_id": 7}')
        return found


def test_a_directory_that_changes_while_it_is_hashed_is_refused(verifier: Path) -> None:
    with pytest.raises(VerifierError, match="changed while it was hashed") as caught:
        describe(Rewritten(verifier, home=None))
    assert "wait" in str(caught.value.mend)


def test_a_log_that_grows_beside_the_model_is_no_change(verifier: Path) -> None:
    class Logged(LocalFiles):
        def sha256(self, names: Sequence[str]) -> list[str]:
            with (self._directory / "train.log").open("a") as log:
                log.write("step\n")
            return super().sha256(names)

    assert describe(Logged(verifier, home=None)).fingerprint == fingerprint(verifier, home=None)


def test_what_was_seen_is_remembered_by_its_digest(verifier: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    found = describe_location(verifier, home=home)
    assert recall(found.fingerprint.digest, home) == found
    assert recall("0" * 64, home) is None
    memory = next((home / "seen").iterdir())
    memory.write_text(memory.read_text().replace("LlamaForCausalLM", "Other"))
    assert recall(found.fingerprint.digest, home) is None, "what was tampered with is not believed"


def test_the_shape_is_that_of_the_text_model(verifier: Path) -> None:
    flat = describe_location(verifier, home=None)
    config = json.loads((verifier / "config.json").read_text())
    (verifier / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": config}))
    assert describe_location(verifier, home=None).shape == flat.shape and flat.shape["hidden_size"] == 64


def test_weights_named_by_an_index_may_lie_in_a_folder(verifier: Path, tmp_path: Path) -> None:
    before = fingerprint(verifier, home=None)
    (verifier / "parts").mkdir()
    shutil.move(verifier / "model.safetensors", verifier / "parts" / "one.safetensors")
    index = {"weight_map": {"model.norm.weight": "parts/one.safetensors"}}
    (verifier / "model.safetensors.index.json").write_text(json.dumps(index))
    assert fingerprint(verifier, home=None) == before
