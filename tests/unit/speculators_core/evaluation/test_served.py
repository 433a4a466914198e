"""A draft as the engine is given it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from speculators_core.algorithms.mtp.build import build
from speculators_core.algorithms.mtp.config import MTPConfig
from speculators_core.algorithms.mtp.export import export
from speculators_core.errors import FormatError
from speculators_core.evaluation.served import SPECULATION, draft_digest, drafted_tokens, served_directory, speculation
from speculators_core.formats.card import ModelCard
from speculators_core.formats.directory import write_draft
from tests.unit.speculators_core.algorithms.native_heads import write_native_verifier

FIXTURES = Path(__file__).parents[3] / "fixtures"


@pytest.fixture
def draft(tmp_path):
    path = tmp_path / "draft"
    path.mkdir()
    (path / "config.json").write_text((FIXTURES / "eagle3_llama_128.config.json").read_text())
    (path / "model.safetensors").write_bytes(b"weights")
    return path


def name_verifier(draft: Path, name: str) -> None:
    config = json.loads((draft / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = name
    (draft / "config.json").write_text(json.dumps(config))


def test_a_draft_that_names_this_verifier_is_served_as_it_is(draft, tmp_path):
    verifier = tmp_path / "verifier"
    name_verifier(draft, str(verifier))
    with served_directory(draft, verifier, tmp_path / "scratch") as served:
        assert served == draft
    assert not (tmp_path / "scratch").exists()


def test_a_draft_of_another_name_is_served_with_this_verifier_and_its_own_weights(draft, tmp_path):
    before = (draft / "config.json").read_text()
    with served_directory(draft, tmp_path / "verifier", tmp_path / "scratch") as served:
        config = json.loads((served / "config.json").read_text())
        assert config["speculators_config"]["verifier"]["name_or_path"] == str(tmp_path / "verifier")
        config["speculators_config"]["verifier"]["name_or_path"] = "tiny-verifier"
        assert config == json.loads(before)
        assert (served / "model.safetensors").read_bytes() == b"weights"
    assert not served.exists()
    assert (draft / "model.safetensors").is_file()
    assert (draft / "config.json").read_text() == before


@pytest.mark.parametrize("changed", ["config.json", "model.safetensors", "mask_embedding.pt"])
def test_the_digest_is_of_what_an_engine_reads(draft, tmp_path, changed):
    assert drafted_tokens(draft) == 3
    (draft / "mask_embedding.pt").write_bytes(b"a row")
    digest = draft_digest(draft)
    moved = draft.rename(tmp_path / "elsewhere")
    assert draft_digest(moved) == digest
    (moved / "README.md").write_text("a card")
    assert draft_digest(moved) == digest
    (moved / changed).write_bytes((moved / changed).read_bytes() + b" ")
    assert draft_digest(moved) != digest


def test_what_is_no_draft_is_refused(tmp_path):
    with pytest.raises(FormatError, match="cannot be read"):
        drafted_tokens(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(FormatError, match="no draft"):
        draft_digest(tmp_path)
    (tmp_path / "config.json").write_text('{"speculators_config": {}}')
    with pytest.raises(FormatError, match="how many tokens"):
        drafted_tokens(tmp_path)


def test_a_native_head_is_served_inside_its_verifier(tmp_path: Path) -> None:
    verifier = write_native_verifier(tmp_path / "verifier", "glm4_moe")
    config = MTPConfig(num_speculative_steps=2)
    head = export(config, build(config, verifier, None, 0), "org/verifier")
    draft = write_draft(tmp_path / "draft", head, ModelCard(title="head"))
    with served_directory(draft, verifier, tmp_path / "scratch") as served:
        assert "speculators_config" not in json.loads((served / "config.json").read_text())
        assert speculation(served, None) == {"method": "mtp", "num_speculative_tokens": 2}
        assert speculation(served, 5) == {"method": "mtp", "num_speculative_tokens": 5}
    assert not served.exists() and not (verifier / SPECULATION).exists()


def test_a_draft_that_is_served_alone_brings_its_own_speculation(tmp_path: Path) -> None:
    assert speculation(tmp_path, None) is None
    assert speculation(tmp_path, 4) == {"num_speculative_tokens": 4}
