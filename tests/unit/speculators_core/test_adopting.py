"""The first stage of adopting a draft: what its key holds, and what is refused before an engine starts."""

from __future__ import annotations

import json
import shutil
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from speculators_core import stages
from speculators_core.config import Recipe
from speculators_core.convert.options import ConvertOptions
from speculators_core.errors import ConfigError, FormatError, StoreError
from speculators_core.run import Run
from speculators_core.store import Store
from tests.unit.speculators_core.algorithms.tiny import write_verifier
from tests.unit.speculators_core.convert import foreign_drafts as foreign


def run_for(tmp_path: Path, kind: str = "eagle3") -> Run:
    verifier = tmp_path / "verifier"
    content = {
        "name": "tiny",
        "deployment": "tiny",
        "verifier": {"path": str(verifier if verifier.exists() else write_verifier(verifier)), "publish_as": "org/v"},
        "data": {"sources": ["nowhere.jsonl"]},
        "algorithm": {"kind": kind},
    }
    return Run(Recipe.model_validate(content), tmp_path / "home")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    tensors = {**foreign.filled(foreign.eagle3_shapes()), **foreign.tables()}
    return foreign.write(tmp_path / "theirs", foreign.eagle3_config(), tensors)


def test_a_draft_is_converted_once_wherever_it_lies(tmp_path: Path, source: Path) -> None:
    run = run_for(tmp_path)
    first = stages.convert(run, str(source), ConvertOptions())
    assert not first.cached and first.ref.kind == "draft"
    assert first.summary["algorithm"] == "eagle3" and first.summary["layout"] == "safeai"
    config = json.loads((run.store.path(first.ref) / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/v"
    moved = shutil.copytree(source, tmp_path / "elsewhere")
    again = stages.convert(run, str(moved), ConvertOptions())
    assert again.cached and again.ref == first.ref
    other = stages.convert(run, str(moved), ConvertOptions(aux_layers=(1, 4, 6)))
    assert not other.cached and other.ref != first.ref


def test_a_draft_that_changes_while_it_is_read_is_not_adopted(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, fly = run_for(tmp_path), Store.single_flight

    def slow_flight(store: Store, kind: str, digest: str) -> AbstractContextManager[None]:
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
        return fly(store, kind, digest)

    with monkeypatch.context() as patch, pytest.raises(FormatError, match=r"theirs changed while it was read"):
        patch.setattr(Store, "single_flight", slow_flight)
        stages.convert(run, str(source), ConvertOptions())
    assert not [*run.store.artifacts()]
    stages.convert(run, str(source), ConvertOptions())


def test_what_cannot_be_adopted_leaves_no_draft(tmp_path: Path, source: Path) -> None:
    with pytest.raises(ConfigError, match=r"of eagle3, and the recipe's algorithm is peagle.*\n.*kind: eagle3"):
        stages.convert(run_for(tmp_path, "peagle"), str(source), ConvertOptions())
    run = run_for(tmp_path)
    with pytest.raises(ConfigError, match="no draft at"):
        stages.convert(run, str(tmp_path / "nothing"), ConvertOptions())
    (source / "model.safetensors").unlink()
    with pytest.raises(FormatError, match="no weights"):
        stages.convert(run, str(source), ConvertOptions())


def test_a_conversion_whose_publication_failed_is_done_again(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_for(tmp_path)

    def refuse(store: Store, workspace: Path, name: str, *_: object) -> None:
        (workspace.parent / ".data.1-killed.part").mkdir()
        raise StoreError(f"the disk is full: {name}")

    with monkeypatch.context() as patch, pytest.raises(StoreError, match="the disk is full"):
        patch.setattr(Store, "_publish_local", refuse)
        stages.convert(run, str(source), ConvertOptions())
    done = stages.convert(run, str(source), ConvertOptions())
    published = run.store.path(done.ref)
    assert sorted(path.name for path in published.parent.iterdir()) == ["data", "manifest.json"]
    assert sorted(path.name for path in published.iterdir()) == ["README.md", "config.json", "model.safetensors"]
