from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hs_connectors.errors import RecordError, SettingsError
from hs_connectors.probe import (
    DIRECTORY_VARIABLE,
    ProbedBatch,
    ProbeSettings,
    follow_requests,
    has_recording,
    read_batches,
    step_name,
)

VOCABULARY, FEATURES, K = 11, 4, 2


def batch(*requests: tuple[str, int, list[int], int, int], seed: int = 0) -> ProbedBatch:
    """Requests (name, first position, token ids, rejected rows behind them, next token) as one call of the drafter."""
    generator = torch.Generator().manual_seed(seed)
    names, first, ids, rejected, following = zip(*requests, strict=True)
    lengths = torch.tensor([len(part) + behind for part, behind in zip(ids, rejected, strict=True)])
    ends = lengths.cumsum(0)
    rows = int(ends[-1])
    return ProbedBatch(
        request_ids=tuple(names),
        token_ids=torch.tensor([t for part, behind in zip(ids, rejected, strict=True) for t in [*part, *[9] * behind]]),
        positions=torch.cat([torch.arange(n) + at for n, at in zip(lengths.tolist(), first, strict=True)]),
        features=torch.randn(rows, FEATURES, generator=generator).bfloat16(),
        starts=ends - lengths,
        ends=ends - torch.tensor(rejected),
        next_token_ids=torch.tensor(following),
        drafted=torch.randint(0, VOCABULARY, (len(names), K), generator=generator),
        logits=torch.randn(len(names), K, VOCABULARY, generator=generator).bfloat16(),
    )


def test_settings_travel_through_the_environment(tmp_path: Path) -> None:
    settings = ProbeSettings(str(tmp_path), 7)
    assert ProbeSettings.from_environment(settings.to_environment()) == settings
    assert ProbeSettings.from_environment({}) is None
    for wrong in ({DIRECTORY_VARIABLE: "/d", "DRAFTSMITH_DRAFT_PROBE_STEPS": value} for value in ("0", "x", "-1")):
        with pytest.raises(SettingsError, match="step"):
            ProbeSettings.from_environment(wrong)


def test_a_batch_comes_back_bit_for_bit(tmp_path: Path) -> None:
    assert not has_recording(tmp_path)
    written = [batch(("a", 0, [1, 2], 0, 3), seed=n) for n in range(3)]
    for number in (2, 0, 1):
        (tmp_path / f"{step_name(number)}.safetensors").write_bytes(written[number].pack())
    assert has_recording(tmp_path)
    for one, other in zip(read_batches(tmp_path), written, strict=True):
        assert one.request_ids == other.request_ids
        for name in set(vars(one)) - {"request_ids"}:
            assert torch.equal(getattr(one, name), getattr(other, name))
            assert getattr(one, name).dtype == getattr(other, name).dtype


def test_what_is_no_step_says_so(tmp_path: Path) -> None:
    (tmp_path / "step-000000.safetensors").write_bytes(b"torn")
    with pytest.raises(RecordError, match="step-000000"):
        list(read_batches(tmp_path))


def test_a_request_is_followed_over_chunks_and_rejected_tokens() -> None:
    first = batch(("a", 0, [1, 2, 3], 0, 4), ("b", 0, [5], 0, 6), seed=1)
    second = batch(("b", 1, [6], 2, 7), ("a", 3, [4, 5], 1, 8), seed=2)  # in another order, rejected rows behind
    third = batch(("a", 5, [8], 0, 1), seed=3)
    steps = list(follow_requests([first, second, third]))
    assert [(step.request_id, step.number) for step in steps] == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2)]
    last = steps[-1]
    assert last.fed_ids.tolist() == [2, 3, 4, 5, 8, 1]
    expected = torch.cat([first.features[:3], second.features[3:5], third.features])
    assert torch.equal(last.features, expected) and last.token_ids.tolist() == [1, 2, 3, 4, 5, 8]
    assert torch.equal(last.drafted, third.drafted[0]) and torch.equal(last.logits, third.logits[0])
    assert steps[2].fed_ids.tolist() == [6, 7]


def test_a_request_that_began_unseen_is_left_out() -> None:
    steps = list(follow_requests([batch(("a", 16, [1, 2], 0, 3), ("b", 0, [4], 0, 5))]))
    assert [step.request_id for step in steps] == ["b"]
