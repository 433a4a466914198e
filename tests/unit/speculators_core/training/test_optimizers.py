from __future__ import annotations

import pytest
import torch
from torch import nn

from speculators_core.errors import ConfigError, TrainingError
from speculators_core.training.config import OptimizerConfig
from speculators_core.training.optimizers import Optimizers, build_optimizers


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(10, 4)
        self.lm_head = nn.Linear(4, 10, bias=False)
        self.table = nn.Parameter(torch.randn(10, 2))
        self.table.is_vocabulary = True  # type: ignore[attr-defined]
        self.column = nn.Parameter(torch.randn(4, 1))
        self.hidden = nn.Linear(4, 4)
        self.frozen = nn.Parameter(torch.randn(4, 4), requires_grad=False)


def one_step(model: Model, optimizers: Optimizers, factor: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator) if parameter.requires_grad else None
    optimizers.step(factor)


def test_muon_takes_hidden_matrices_only() -> None:
    optimizers = build_optimizers(Model(), OptimizerConfig(kind="muon"))
    adamw, muon = optimizers.names
    assert muon == ("hidden.weight",)
    assert set(adamw) == {"embed_tokens.weight", "lm_head.weight", "table", "column", "hidden.bias"}
    assert isinstance(optimizers.members[1], torch.optim.Muon)


def test_weight_decay_spares_vectors() -> None:
    optimizers = build_optimizers(Model(), OptimizerConfig(weight_decay=0.3))
    by_decay = {group["weight_decay"]: len(group["params"]) for group in optimizers.members[0].param_groups}
    assert by_decay == {0.3: 5, 0.0: 1}


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_state_round_trip_continues_bit_for_bit(kind: str) -> None:
    config = OptimizerConfig.model_validate({"kind": kind})
    straight, resumed = Model(), Model()
    ours, theirs = build_optimizers(straight, config), build_optimizers(resumed, config)
    for _ in range(3):
        one_step(straight, ours, 0.7)
        one_step(resumed, theirs, 0.7)
    saved = {name: value.clone() for name, value in theirs.state_tensors().items()}
    fresh = build_optimizers(resumed, config)
    fresh.load_state_tensors(saved)
    one_step(straight, ours, 0.3)
    one_step(resumed, fresh, 0.3)
    for a, b in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


def test_state_of_another_draft_is_refused() -> None:
    model = Model()
    optimizers = build_optimizers(model, OptimizerConfig())
    one_step(model, optimizers)
    state = optimizers.state_tensors()
    with pytest.raises(TrainingError, match="unknown parameters: other"):
        build_optimizers(Model(), OptimizerConfig()).load_state_tensors({**state, "other.exp_avg": torch.ones(1)})
    with pytest.raises(TrainingError, match=r"hidden\.weight\.exp_avg is"):
        wrong = {**state, "hidden.weight.exp_avg": torch.ones(3, 3)}
        build_optimizers(Model(), OptimizerConfig()).load_state_tensors(wrong)


def test_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(ConfigError, match="no trainable parameter"):
        build_optimizers(Model().requires_grad_(False), OptimizerConfig())
