"""What the trainer, the tasks and the flows may expect of every algorithm, whatever its name."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from speculators_core import registry
from speculators_core.errors import ConfigError
from speculators_core.formats.card import ModelCard
from speculators_core.formats.directory import write_draft
from speculators_core.formats.servable import check_servable
from speculators_core.training.weights import start_from
from speculators_core.types import Algorithm, DraftPlan, StepResult
from tests.unit.speculators_core.algorithms.native_heads import write_native_verifier
from tests.unit.speculators_core.algorithms.tiny import LAYERS, VOCAB, pack, sample, vocabulary


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It has a native head, which only the algorithm that trains one looks at."""
    return write_native_verifier(tmp_path_factory.mktemp("verifier"), "mimo")


@pytest.fixture(params=registry.names())
def algorithm(request: pytest.FixtureRequest) -> Algorithm:
    return registry.resolve(request.param)


def test_its_name_is_its_kind(algorithm: Algorithm) -> None:
    config = algorithm.config()
    assert config.kind == algorithm.name  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="surprise"):
        algorithm.config(surprise=1)


def test_its_layers_are_ascending_and_distinct(algorithm: Algorithm) -> None:
    for depth in (LAYERS, 24, 61):
        layers = algorithm.aux_layers(algorithm.config(), depth)
        assert list(layers) == sorted(set(layers)) and all(layer < depth for layer in layers)


def takes_reduced_vocabulary(algorithm: Algorithm, verifier: Path) -> bool:
    """What the algorithm says of a recipe with a reduced vocabulary, before anything runs."""
    plan = DraftPlan(verifier, VOCAB, VOCAB // 2, row_tokens=1024, allow_unservable=True)
    try:
        algorithm.check(algorithm.config(), plan)
    except ConfigError as error:
        assert "draft_vocabulary" in str(error)
        return False
    return True


@pytest.mark.parametrize("reduced", [True, False])
def test_it_trains_walks_and_exports(algorithm: Algorithm, verifier: Path, reduced: bool) -> None:
    config = algorithm.config()
    if reduced and not takes_reduced_vocabulary(algorithm, verifier):
        with pytest.raises(ConfigError, match="draft_vocabulary"):
            algorithm.build(config, verifier, vocabulary(), 0)
        return
    model = algorithm.build(config, verifier, vocabulary() if reduced else None, 0)
    objective = algorithm.objective(config)
    row = objective.align(sample(20, [(6, 20)]))
    batch = pack([row], 24)
    denominators = objective.denominators(batch)
    assert denominators.dtype == torch.float64 and denominators.dim() == 1
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3)
    losses = []
    for _ in range(12):
        with torch.autocast("cpu", torch.bfloat16):
            result = objective.step(model, batch, denominators)
        assert isinstance(result, StepResult)
        torch.autograd.backward(result.loss)
        assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in trained)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(result.loss.detach()))
    assert losses[-1] < 0.8 * losses[0]
    lengths = objective.walk(model, row, 3)
    assert lengths and all(0 <= length <= 3 for length in lengths)
    check_servable(algorithm.export(config, model, "org/verifier"))


@pytest.mark.parametrize("reduced", [True, False])
def test_training_begins_from_a_draft_with_the_new_verifiers_parts(
    algorithm: Algorithm, verifier: Path, reduced: bool, tmp_path: Path
) -> None:
    if reduced and not takes_reduced_vocabulary(algorithm, verifier):
        pytest.skip("its vocabulary is always the verifier's")
    config, tokens = algorithm.config(), vocabulary() if reduced else None
    old = algorithm.build(config, verifier, tokens, 1)
    with torch.no_grad():
        for parameter in (p for p in old.parameters() if p.requires_grad):
            parameter.add_(0.1 * torch.randn_like(parameter))
    draft = write_draft(tmp_path / "draft", algorithm.export(config, old, "org/verifier"), ModelCard(title="old"))
    changed = write_native_verifier(tmp_path / "changed", "mimo", seed=9)
    begun, fresh = (algorithm.build(config, changed, tokens, 2) for _ in range(2))
    start_from(begun, draft, names=partial(algorithm.names, config))
    theirs, new = dict(old.named_parameters()), dict(fresh.named_parameters())
    trained = [name for name, parameter in begun.named_parameters() if parameter.requires_grad]
    assert trained
    for name, parameter in begun.named_parameters():
        expected = theirs[name].bfloat16().float() if name in trained else new[name]
        assert torch.equal(parameter, expected), name
    assert any(not torch.equal(theirs[name], new[name]) for name in theirs if name not in trained)


def test_half_the_denominators_are_half_of_the_loss(algorithm: Algorithm, verifier: Path) -> None:
    """Losses are shares of a global mean: micro-batches and ranks add up."""
    config = algorithm.config()
    model, objective = algorithm.build(config, verifier, None, 0), algorithm.objective(config)
    batch = pack([objective.align(sample(20, [(6, 20)]))], 20)
    denominators = objective.denominators(batch)
    with torch.no_grad():
        torch.manual_seed(0)  # what an algorithm draws, it draws from torch's own generator
        whole = objective.step(model, batch, denominators)
        torch.manual_seed(0)
        shared = objective.step(model, batch, denominators * 2)
    torch.testing.assert_close(shared.loss * 2, whole.loss)
    assert shared.metrics["loss"].mean == pytest.approx(whole.metrics["loss"].mean)
    for name in (name for name in whole.metrics if "loss" not in name):
        assert shared.metrics[name] == whole.metrics[name], name


def test_metrics_need_no_replies(algorithm: Algorithm, verifier: Path) -> None:
    config = algorithm.config()
    model, objective = algorithm.build(config, verifier, None, 0), algorithm.objective(config)
    silent = replace(sample(20, []), row=1)
    batch = pack([objective.align(silent)], 20)
    assert float(objective.denominators(batch).sum()) == 0.0
    assert objective.walk(model, objective.align(silent), 3) == []


def test_names_and_settings_are_read_without_torch() -> None:
    code = (
        "import sys; from speculators_core import registry\n"
        "for name in registry.names(): registry.resolve(name).config()\n"
        "assert 'torch' not in sys.modules, 'a command line would wait for torch'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2], timeout=60)


def test_an_unknown_name_gets_the_nearest_right_one() -> None:
    with pytest.raises(ConfigError, match="eagle3"):
        registry.resolve("eagel3")
