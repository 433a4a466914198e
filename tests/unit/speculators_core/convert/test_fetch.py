"""Both sides of a conversion by directory or hub id; what a draft calls its verifier then."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from speculators_core.convert.fetch import fetch_source, fetch_verifier
from speculators_core.convert.source import Source
from speculators_core.errors import ConfigError
from tests.unit.speculators_core.algorithms.tiny import write_verifier
from tests.unit.speculators_core.convert import foreign_drafts as foreign
from tests.unit.speculators_core.verifier.hub_server import Hub, serve_hub

DRAFT, VERIFIER = "garden/draft", "garden/tiny"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    draft = foreign.write(tmp_path / "draft", foreign.block_config(), foreign.filled(foreign.block_shapes()))
    (draft / "pytorch_model.bin").write_bytes(b"a pickle")
    with serve_hub() as served:
        for name, directory in ((DRAFT, draft), (VERIFIER, write_verifier(tmp_path / "verifier"))):
            served.models[name] = {file.name: file.read_bytes() for file in directory.iterdir()}
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        yield served


def test_a_hubs_draft_is_fetched_at_its_revision_and_never_its_pickles(hub: Hub, tmp_path: Path) -> None:
    found = fetch_source(f"{DRAFT}@{hub.commit(DRAFT)}", home=tmp_path / "home", allow_bin=True)
    assert torch.equal(found.tensors()["fc.weight"], foreign.filled(foreign.block_shapes())["fc.weight"])
    assert not hub.fetched("pytorch_model.bin")
    directory, name = fetch_verifier(VERIFIER, found, home=tmp_path / "home")
    assert name == VERIFIER and directory is not None and (directory / "model.safetensors").is_file()


def test_a_checkpoint_may_say_which_verifier_it_is_for(tmp_path: Path) -> None:
    verifier = write_verifier(tmp_path / "verifier")
    draft = tmp_path / "draft"
    draft.mkdir()
    section = {"verifier": {"name_or_path": str(verifier)}}
    (draft / "config.json").write_text(json.dumps({"speculators_config": section}))
    assert fetch_verifier(None, Source(draft), home=tmp_path) == (verifier, None)
    assert fetch_verifier(str(verifier), Source(draft), home=tmp_path) == (verifier, None)
    (draft / "config.json").write_text(json.dumps({"speculators_config": {"verifier": {"name_or_path": "org/v"}}}))
    assert fetch_verifier(None, Source(draft), home=tmp_path) == (None, None)
    (draft / "config.json").write_text("{}")
    assert fetch_verifier(str(verifier), Source(draft), home=tmp_path) == (verifier, str(verifier))
    with pytest.raises(ConfigError, match="no draft at"):
        fetch_source("neither/a/hub/id", home=tmp_path, allow_bin=False)
