"""Where training begins: what its key holds, what is found again, and what is refused before anything is captured."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from speculators_core import stages
from speculators_core.config import Recipe
from speculators_core.drafts import algorithm_of, export_untrained
from speculators_core.errors import ConfigError, FormatError
from speculators_core.formats.card import ModelCard
from speculators_core.preflight import check_warm_start
from speculators_core.run import NotProduced, Run, WarmStart
from speculators_core.training.weights import start_from
from speculators_core.types import ArtifactRef
from speculators_core.verifier.weights import read_head
from tests.unit.speculators_core.algorithms.tiny import vocabulary, write_verifier

STATES = ArtifactRef(kind="states", uri="file:///nowhere", digest="s" * 64)


def recipe(verifier: Path, **training: object) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "tiny",
            "deployment": "tiny",
            "verifier": {"path": str(verifier)},
            "data": {"sources": ["nowhere.jsonl"]},
            "algorithm": {"kind": "eagle3"},
            "draft_vocabulary": 40,
            "training": training,
        }
    )


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(recipe(write_verifier(tmp_path / "verifier")), tmp_path / "home", only_look=True)


def key(run: Run, start: WarmStart | None) -> str:
    return stages.training_key(run, STATES, start)[-1]


def test_the_key_holds_the_drafts_digest_and_never_where_it_lies(run: Run) -> None:
    start = WarmStart(digest="d", path="/here")
    assert key(run, start) == key(run, WarmStart(digest="d", path="/there", before=(None,)))
    assert key(run, start) != key(run, None)
    assert key(run, start) != key(run, WarmStart(digest="e", path="/here"))
    assert key(run, start) != key(run, WarmStart(digest="d", path="/here", head=False))
    named = replace(run, recipe=recipe(run.verifier, warm_start="champion"))
    assert key(named, None) == key(run, None), "the name of the draft is not what training depends on"


@pytest.mark.parametrize("began", [None, WarmStart(digest="older", path=None)])
def test_a_champion_that_this_run_has_made_is_found_and_not_trained_further(run: Run, began: WarmStart | None) -> None:
    champion = WarmStart(digest="champion", path="/champion", before=(began,))
    started = replace(run, warm_start=champion)
    with pytest.raises(NotProduced) as missing:
        stages.train(started, STATES)
    assert missing.value.missing is not None
    assert missing.value.missing.inputs["warm start"] == "champion"

    workspace = run.store.workspace("training", key(run, began))
    (workspace / "result.json").write_text("{}")
    run.store.publish(workspace, "training", key(run, began), {"steps": 7}, producer={})
    found = stages.train(started, STATES)
    assert found.cached and found.summary == {"steps": 7}
    assert found.inputs.get("warm start") == (None if began is None else "older")


def draft_of(verifier: Path, target: Path) -> Path:
    return export_untrained({"kind": "eagle3"}, verifier, 40, "org/v", target, ModelCard(title="t"))


def test_preflight_refuses_what_training_could_not_begin_from(tmp_path: Path) -> None:
    verifier = write_verifier(tmp_path / "verifier")
    draft = draft_of(verifier, tmp_path / "draft")
    check_warm_start(recipe(verifier), verifier, draft, head=True)

    wider = write_verifier(tmp_path / "wider", intermediate_size=64)
    with pytest.raises(ConfigError, match=r"training\.warm_start: .* does not fit: layers\.0\.mlp\."):
        check_warm_start(recipe(wider), wider, draft, head=True)
    other = recipe(verifier).model_copy(update={"algorithm": {"kind": "eagle3", "layers": 2}})
    with pytest.raises(ConfigError, match=r"layers\.1\..* is missing"):
        check_warm_start(other, verifier, draft, head=True)

    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**config, "speculators_model_type": "dflash"}))
    with pytest.raises(ConfigError, match=r"warm_start: .* is a draft of dflash, but algorithm\.kind is eagle3"):
        check_warm_start(recipe(verifier), verifier, draft, head=True)
    with pytest.raises(FormatError, match=r"nothing holds no config\.json"):
        check_warm_start(recipe(verifier), verifier, verifier / "nothing", head=True)


@pytest.mark.parametrize(
    ("begins", "from_"),
    [
        ({"kind": "dspark", "layers": 1}, {"kind": "dflash", "layers": 1}),
        ({"kind": "dflash", "layers": 1}, {"kind": "dflash", "layers": 1, "train_mask_embedding": False}),
    ],
)
def test_what_the_draft_to_start_from_has_not_yet_stays_fresh(
    tmp_path: Path, begins: dict[str, object], from_: dict[str, object]
) -> None:
    verifier = write_verifier(tmp_path / "verifier")
    draft = export_untrained(from_, verifier, 40, "org/v", tmp_path / "draft", ModelCard(title="t"))
    check_warm_start(recipe(verifier).model_copy(update={"algorithm": begins}), verifier, draft, head=True)
    algorithm, settings = algorithm_of(begins)
    model, fresh = (algorithm.build(settings, verifier, vocabulary(), 5) for _ in range(2))
    start_from(model, draft, names=partial(algorithm.names, settings), additions=algorithm.additions)
    theirs, own = load_file(draft / "model.safetensors"), dict(fresh.named_parameters())
    for name, parameter in model.named_parameters():
        expected = theirs[name].float() if name in theirs and parameter.requires_grad else own[name]
        assert torch.equal(parameter, expected), name
    assert not own.keys() <= theirs.keys()
    with pytest.raises(ConfigError, match="is missing"):
        start_from(model, draft)


@pytest.mark.parametrize("head", [True, False])
def test_no_table_over_other_tokens_is_taken(tmp_path: Path, head: bool) -> None:
    verifier = write_verifier(tmp_path / "verifier")
    draft = export_untrained({"kind": "peagle"}, verifier, 40, "org/v", tmp_path / "draft", ModelCard(title="t"))
    changed = write_verifier(tmp_path / "changed", seed=8)
    algorithm, settings = algorithm_of({"kind": "peagle"})
    model = algorithm.build(settings, changed, vocabulary(), 5)
    start_from(model, draft, head=head)
    source = read_head(verifier if head else changed)
    begun, theirs = model.state_dict(), load_file(draft / "model.safetensors")
    assert torch.equal(begun["embed_tokens.weight"], source.embed_VH.float())
    assert torch.equal(begun["fc.weight"], theirs["fc.weight"].float())
