"""A draft vocabulary that the recipe brings: part of the draft's key by its tokens, and what training then uses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from speculators_core import stages
from speculators_core.build import _draft_vocabulary
from speculators_core.config import Recipe
from speculators_core.data.vocabulary import DraftVocabulary
from speculators_core.errors import ConfigError, DataError
from speculators_core.run import Run
from speculators_core.training.request import VOCABULARY, TrainRequest
from speculators_core.types import ArtifactRef
from tests.unit.speculators_core.algorithms.tiny import VOCAB, vocabulary, write_verifier
from tests.unit.speculators_core.training.toy import CPU, make_states

STATES = ArtifactRef(kind="states", uri="file:///nowhere", digest="s" * 64)
SIZE = 40


def tables(path: Path, ids: torch.Tensor | None = None) -> Path:
    kept = vocabulary(SIZE)
    if ids is None:
        save_file({"d2t": kept.d2t, "t2d": kept.t2d}, path)
    else:
        save_file({"d2t": ids - torch.arange(len(ids))}, path)
    return path


def run_with(tmp_path: Path, source: Path | None, size: int | None = SIZE) -> Run:
    verifier = tmp_path / "verifier"
    content = {
        "name": "tiny",
        "deployment": "tiny",
        "verifier": {"path": str(verifier if verifier.exists() else write_verifier(verifier))},
        "data": {"sources": ["nowhere.jsonl"]},
        "algorithm": {"kind": "eagle3"},
        "draft_vocabulary": size,
        "draft_vocabulary_from": None if source is None else str(source),
    }
    return Run(Recipe.model_validate(content), tmp_path / "home", only_look=True)


def test_its_tokens_and_not_its_path_decide_what_is_trained(tmp_path: Path) -> None:
    here, there = tables(tmp_path / "a.safetensors"), tables(tmp_path / "b.safetensors")
    others = tables(tmp_path / "c.safetensors", torch.arange(SIZE) + 50)
    keys = [stages.training_key(run_with(tmp_path, source), STATES, None)[-1] for source in (here, there, others, None)]
    assert keys[0] == keys[1] and len(set(keys)) == 3


def test_what_does_not_fit_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="draft_vocabulary_from needs draft_vocabulary"):
        run_with(tmp_path, tmp_path / "a.safetensors", None)
    # the key of the loop's first stage holds the shape
    with pytest.raises(ConfigError, match="names 40 tokens, and draft_vocabulary is 41"):
        assert run_with(tmp_path, tables(tmp_path / "a.safetensors"), 41).draft_shape
    with pytest.raises(DataError, match="out of range"):
        assert run_with(tmp_path, tables(tmp_path / "b.safetensors", torch.arange(SIZE) + VOCAB)).draft_shape


def test_training_takes_it_and_keeps_it_for_the_export(tmp_path: Path) -> None:
    source = tables(tmp_path / "a.safetensors")
    request = TrainRequest(
        states="nowhere",
        verifier=str(write_verifier(tmp_path / "verifier")),
        algorithm={"kind": "eagle3"},
        draft_vocabulary_size=SIZE,
        draft_vocabulary_from=str(source),
        output=str(tmp_path),
    )
    found = _draft_vocabulary(request, make_states(), CPU)
    kept = vocabulary(SIZE)
    assert found is not None and torch.equal(found.d2t, kept.d2t) and torch.equal(found.t2d, kept.t2d)
    stored = DraftVocabulary(**load_file(tmp_path / VOCABULARY))
    assert stored.digest == found.digest
