from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from speculators_core.errors import ConfigError, TrainingError
from speculators_core.training import checkpoints
from speculators_core.training.checkpoints import Checkpoint
from speculators_core.training.weights import load_trained_tensors, start_from, trained_tensors
from tests.unit.speculators_core.training.toy import ToyDraft


def test_only_what_training_owns_is_saved() -> None:
    model = ToyDraft()
    model.known_twice = model.lm_head  # a frozen parameter under a second name stays out
    assert set(trained_tensors(model)) == {"fc.weight", "norm", "d2t"}


def test_loading_names_what_does_not_fit() -> None:
    tensors = {**trained_tensors(ToyDraft()), "norm": torch.ones(3), "extra": torch.ones(1)}
    del tensors["fc.weight"]
    with pytest.raises(TrainingError, match=r"extra is unknown; fc\.weight is missing; norm is \(3,\), not \(8,\)"):
        load_trained_tensors(ToyDraft(), tensors)


@pytest.mark.parametrize("kind", ["checkpoint", "exported draft"])
def test_warm_start_takes_trainable_weights_and_leaves_the_verifiers_alone(tmp_path: Path, kind: str) -> None:
    old, new = ToyDraft(seed=1), ToyDraft(seed=2)
    verifier_head, verifier_table = new.lm_head.clone(), new.embed_tokens.weight.clone()
    if kind == "checkpoint":
        checkpoints.save(tmp_path / "best", Checkpoint({"model": trained_tensors(old)}, {}))
    else:
        (tmp_path / "best").mkdir()
        tensors = {name: value.to(torch.bfloat16) for name, value in old.state_dict().items()}
        safetensors.torch.save_file(tensors, tmp_path / "best" / "model.safetensors")
    start_from(new, tmp_path / "best")
    torch.testing.assert_close(new.fc.weight, old.fc.weight, rtol=1e-2, atol=1e-3)
    assert new.fc.weight.dtype == torch.float32
    assert torch.equal(new.lm_head, verifier_head) and torch.equal(new.embed_tokens.weight, verifier_table)


def test_warm_start_from_nothing_torn_or_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no model\.safetensors"):
        start_from(ToyDraft(), tmp_path)
    checkpoints.save(tmp_path / "best", Checkpoint({"model": trained_tensors(ToyDraft())}, {}))
    with (tmp_path / "best" / "model.safetensors").open("r+b") as file:
        file.seek(-3, 2)
        file.write(b"xyz")
    with pytest.raises(TrainingError, match="damaged"):
        start_from(ToyDraft(), tmp_path / "best")
    (tmp_path / "best" / "manifest.json").unlink()
    (tmp_path / "best" / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(TrainingError, match="cannot be read"):
        start_from(ToyDraft(), tmp_path / "best")
    other = nn.Module()
    other.fc = nn.Linear(2, 2)
    safetensors.torch.save_file(ToyDraft().state_dict(), tmp_path / "best" / "model.safetensors")
    with pytest.raises(ConfigError, match=r"does not fit: fc\.bias is missing; fc\.weight is \(8, 16\)"):
        start_from(other, tmp_path / "best")


class TrainedHead(nn.Module):
    def __init__(self, tokens: list[int], value: float) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2, bias=False)
        self.lm_head = nn.Linear(2, len(tokens), bias=False)
        self.register_buffer("d2t", torch.tensor(tokens) - torch.arange(len(tokens)))
        for parameter in self.parameters():
            nn.init.constant_(parameter, value)


@pytest.mark.parametrize(
    ("tokens", "head", "taken"), [([1, 5], True, True), ([1, 5], False, False), ([1, 6], True, False)]
)
def test_a_trained_head_is_taken_only_where_its_rows_mean_the_same_tokens(
    tmp_path: Path, tokens: list[int], head: bool, taken: bool
) -> None:
    safetensors.torch.save_file(TrainedHead([1, 5], 2.0).state_dict(), tmp_path / "model.safetensors")
    model = TrainedHead(tokens, 3.0)
    start_from(model, tmp_path, head=head)
    assert torch.all(model.fc.weight == 2.0)
    assert torch.all(model.lm_head.weight == (2.0 if taken else 3.0))
