from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from speculators_core.algorithms._blocks.dynamic_conv import DynamicConv
from speculators_core.algorithms._blocks.selector import with_target
from speculators_core.algorithms.dflash2.build import build
from speculators_core.algorithms.dflash2.config import DFlash2Config, check
from speculators_core.algorithms.dflash2.export import export
from speculators_core.algorithms.dflash2.model import DFlash2Draft
from speculators_core.algorithms.dflash2.objective import DFlash2Objective
from speculators_core.errors import ConfigError
from speculators_core.types import Aligned, DraftPlan
from tests.unit.speculators_core.algorithms.properties import (
    check_that_packed_is_unpacked,
    check_that_the_walk_is_the_served_loop,
)
from tests.unit.speculators_core.algorithms.tiny import HIDDEN, VOCAB, pack, sample, vocabulary, write_verifier


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_verifier(tmp_path_factory.mktemp("verifier"))


def made(verifier: Path, **knobs: Any) -> tuple[DFlash2Draft, DFlash2Objective]:
    defaults = {"block_size": 5, "layers": 2, "selector_rank": 6, "selector_top_k": 4, "mask_token_id": VOCAB - 1}
    config = DFlash2Config(**{**defaults, **knobs})
    model = build(config, verifier, None, seed=11)
    torch.manual_seed(0)
    for module in model.modules():  # as if trained: kernels and transitions that matter
        if isinstance(module, DynamicConv):
            torch.nn.init.normal_(module.base_kernel, std=0.5)
            torch.nn.init.normal_(module.kernel_projection.weight, std=0.2)
    torch.nn.init.normal_(model.candidate_selector.predecessor_codebook)
    torch.nn.init.normal_(model.candidate_selector.successor_codebook)
    return model, DFlash2Objective(config)


@pytest.mark.parametrize("taps", [1, 2, 3, 9])
def test_the_convolution_is_its_definition(taps: int) -> None:
    torch.manual_seed(0)
    conv = DynamicConv(8, taps, 4)
    x = torch.randn(3, 5, 8)
    assert torch.equal(conv.before(x)[0], x)  # fresh: the identity
    torch.nn.init.normal_(conv.base_kernel)
    torch.nn.init.normal_(conv.kernel_projection.weight)
    before, kernels = conv.before(x)
    after = conv.after(before, kernels)
    delta = conv.kernel_projection(x).view(3, 5, 2, taps, 2)
    for side, source, found in ((0, x, before), (1, before, after)):
        for block in range(3):
            for slot in range(5):
                expected = torch.zeros(8)
                for tap in range(min(taps, slot + 1)):
                    kernel = conv.base_kernel[side, tap] + delta[block, slot, side, tap].repeat_interleave(4)
                    expected += kernel * source[block, slot - tap]
                torch.testing.assert_close(found[block, slot], expected)


def test_an_absent_target_takes_the_last_candidates_place() -> None:
    candidates, place, present = with_target(torch.tensor([[5, 3, 9], [5, 3, 9]]), torch.tensor([3, 7]))
    assert candidates.tolist() == [[5, 3, 9], [5, 3, 7]]
    assert place.tolist() == [1, 2] and present.tolist() == [True, False]


@torch.no_grad()
def propose(model: DFlash2Draft, aligned: Aligned, anchor: int, k: int) -> list[int]:
    """As vLLM chooses: left to right among each slot's best tokens, knowing the one just chosen."""
    from speculators_core.algorithms._blocks.block_draft import Blocks

    blocks = Blocks(torch.tensor([anchor]), torch.zeros_like(aligned.input_ids), k + 1, 1)
    states = model(aligned.input_ids, aligned.position_ids, aligned.aux_TAH, blocks)[0]
    selector, previous = model.candidate_selector, int(aligned.input_ids[anchor])
    chosen: list[int] = []
    for state in states:
        logits, best = (model.lm_head.weight.to(state.dtype) @ state).topk(model.config.selector_top_k)
        context = selector.predecessor_codebook[previous] * (selector.hidden_projection.weight @ state)
        previous = int(best[(logits + selector.successor_codebook[best] @ context).argmax()])
        chosen.append(previous)
    return chosen


def test_the_walk_is_the_served_loop(verifier: Path) -> None:
    model, objective = made(verifier)
    check_that_the_walk_is_the_served_loop(model, objective, propose)


def test_packed_is_unpacked(verifier: Path) -> None:
    model, objective = made(verifier)
    check_that_packed_is_unpacked(model, objective)


def test_every_part_learns(verifier: Path) -> None:
    model, objective = made(verifier)
    batch = pack([objective.align(sample(20, [(6, 20)]))], 20)
    objective.step(model, batch, objective.denominators(batch)).loss.backward()  # type: ignore[no-untyped-call]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and float(parameter.grad.abs().sum()) > 0, name


def test_exports_have_all_parts_and_no_tables_of_the_verifier(verifier: Path) -> None:
    model, objective = made(verifier)
    draft = export(objective.config, model, "v")
    assert draft.tensors["candidate_selector.predecessor_codebook"].shape == (VOCAB, 6)
    assert draft.tensors["layers.1.mlp_conv.base_kernel"].shape == (2, 2, HIDDEN)
    assert not any(name.startswith(("lm_head", "embed_tokens", "teacher")) for name in draft.tensors)
    assert draft.config["sliding_window_non_causal"] is True


def test_what_it_cannot_do_is_refused(verifier: Path) -> None:
    config = DFlash2Config(mask_token_id=VOCAB - 1)
    with pytest.raises(ConfigError, match="draft_vocabulary"):
        check(config, DraftPlan(verifier, VOCAB, 40, row_tokens=64, allow_unservable=False))
    check(config, DraftPlan(verifier, VOCAB, VOCAB, row_tokens=64, allow_unservable=False))
    with pytest.raises(ConfigError, match="draft_vocabulary"):
        build(config, verifier, vocabulary(), seed=0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="conv_group_size"):
        made(verifier, conv_group_size=5)
    with pytest.raises(ValueError, match="masks alone"):
        DFlash2Config(sample_from_anchor=True)
    with pytest.raises(ValueError, match="sliding_window_non_causal to true"):
        DFlash2Config(sliding_window=None, sliding_window_non_causal=False)
