"""Every gate lets good records pass and names a planted fault."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from synthetic_states import FACTS, make_rows, record_for, states_for

from hs_connectors.contract import CPU_SCHEDULER
from speculators_core.engine.config import NO_PREFIX_CACHING, build_arguments
from speculators_core.errors import CaptureError, ConfigError, DiskSpaceError
from speculators_core.states.capture import capture_server, require_disk
from speculators_core.states.config import CaptureConfig
from speculators_core.states.gates import check_layers, check_record
from speculators_core.states.parity import compare_states

ROW = make_rows([12]).row(0)
IDS = ROW.input_ids.long()
GOOD = record_for(ROW)


def states_with(change) -> torch.Tensor:
    states = GOOD.hidden_states.clone()
    change(states)
    return states


def nan(states: torch.Tensor) -> None:
    states[7, 1, 3] = float("nan")


def infinite(states: torch.Tensor) -> None:
    states[0, 2, 0] = float("-inf")


def constant(states: torch.Tensor) -> None:
    states[:, 1] = states[0, 1]


def zero(states: torch.Tensor) -> None:
    states[:, 0] = 0


def test_a_good_record_passes():
    check_record(GOOD, 0, IDS, FACTS)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"token_ids": IDS.clone().index_fill_(0, torch.tensor([4]), 63)}, "row 5: token 4 of the record is 63"),
        ({"token_ids": IDS[:-1], "hidden_states": GOOD.hidden_states[:-1]}, "11 tokens were captured where 12"),
        ({"layer_ids": (1, 3, 4)}, r"layers \[1, 3, 4\] were captured, wanted are \[1, 2, 4\]"),
        ({"verifier_fingerprint": "a" * 64}, "captured from verifier aaaaaaaaaaaa"),
        ({"hidden_states": GOOD.hidden_states.float()}, "torch.float32, wanted is bfloat16"),
        ({"hidden_states": GOOD.hidden_states[:, :, :4]}, r"shape \[12, 3, 4\]"),
        ({"hidden_states": states_with(nan)}, "layer 2 at token 7 is not finite"),
        ({"hidden_states": states_with(infinite)}, "layer 4 at token 0 is not finite"),
        ({"hidden_states": states_with(constant)}, "layer 2 are the same at every token"),
        ({"hidden_states": states_with(zero)}, "layer 1 are zero"),
    ],
)
def test_a_planted_fault_is_named(fault: dict[str, object], message: str):
    with pytest.raises(CaptureError, match=message):
        check_record(replace(GOOD, **fault), 5, IDS, FACTS)


def test_equal_tokens_may_have_equal_states():
    ids = torch.full((3,), 9)
    states = GOOD.hidden_states[:1].expand(3, -1, -1).contiguous()
    check_record(replace(GOOD, token_ids=ids, hidden_states=states), 0, ids, FACTS)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((1, 1, 4), "distinct and ascending"),
        ((2, 1, 4), "distinct and ascending"),
        ((), "distinct and ascending"),
        ((1, 9), r"\[9\] are out of range: the verifier has 4 layers"),
        ((-1, 4), "out of range"),
        ((1, 2), "must be 4, not 2"),
    ],
)
def test_wrong_layer_ids_are_refused_with_a_cure(layers: tuple[int, ...], message: str):
    with pytest.raises(ConfigError, match=message) as caught:
        check_layers(layers, 4)
    assert caught.value.mend


def test_parity_accepts_rounding_and_names_the_layer_that_differs():
    reference = {n: states_for(row).float() for n, row in enumerate(make_rows([20, 30]).content)}
    captured = {n: (states * 1.001).to(torch.bfloat16) for n, states in reference.items()}
    report = compare_states(captured, reference, (1, 2, 4), 0.999)
    assert report.tokens == 50 and [entry.layer for entry in report.layers] == [1, 2, 4]
    assert all(entry.cosine > 0.9999 for entry in report.layers)
    captured[1][:, 2] = captured[1][:, 2].roll(1, dims=0)  # states shifted by one token
    with pytest.raises(CaptureError, match=r"(?s)layer 4 of row 1 has cosine.*before the final norm"):
        compare_states(captured, reference, (1, 2, 4), 0.999)
    captured[0][3, 0] = float("nan")
    with pytest.raises(CaptureError, match="cosine"):
        compare_states(captured, reference, (1, 2, 4), 0.999)


@pytest.mark.parametrize("shared", [True, False])
def test_rows_share_beginnings_unless_told_otherwise(shared: bool, tmp_path: Path):
    config = CaptureConfig(prefix_caching=shared)
    spec = capture_server(config, tmp_path, (1, 2), "f" * 64, tmp_path, max_model_len=64, device="cpu")
    assert (NO_PREFIX_CACHING in build_arguments(spec, 8000)) is not shared


@pytest.mark.parametrize(("device", "expected"), [("cpu", True), ("cuda", False), ("unknown", False)])
def test_a_cpu_schedules_no_drafts_and_a_gpu_goes_on_scheduling_ahead(device: str, expected: bool, tmp_path: Path):
    spec = capture_server(CaptureConfig(), tmp_path, (1, 2), "f" * 64, tmp_path, max_model_len=64, device=device)
    assert (CPU_SCHEDULER in build_arguments(spec, 8000)) is expected


def test_too_little_disk_is_refused_with_both_figures(tmp_path: Path):
    require_disk(tmp_path / "not" / "yet", 1000)
    with pytest.raises(DiskSpaceError, match=r"(?s)need 1048576.00 GiB, and .* GiB are free at .*mend: free space"):
        require_disk(tmp_path, 1 << 50)
