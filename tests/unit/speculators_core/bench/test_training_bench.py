from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
import torch

from speculators_core.bench.anonymous_memory import PeakAnonymousMemory, anonymous_bytes
from speculators_core.bench.setup import BenchSettings, batches_of
from speculators_core.bench.training import BenchReport, Side, _run
from speculators_core.errors import TrainingError
from speculators_core.training.loader import PackedRows
from tests.unit.speculators_core.training.toy import ToyObjective, config, make_states


def test_peak_memory_sees_what_was_freed_again() -> None:
    watch = PeakAnonymousMemory(every_seconds=0.005)
    block = torch.ones(16 << 20)  # 64 MiB
    deadline = time.monotonic() + 20  # on a machine that is busy the watching thread is seldom asked
    while watch.rise <= 60 << 20 and time.monotonic() < deadline:
        block.mul_(1.0)
    del block
    watch.stop()
    assert watch.rise > 60 << 20
    assert watch.level <= watch.peak and anonymous_bytes() > 0


def test_mapped_files_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "mapped"
    path.write_bytes(bytes(64 << 20))
    watch = PeakAnonymousMemory(every_seconds=0.005)
    mapped = torch.from_file(str(path), shared=True, size=64 << 20, dtype=torch.uint8)
    assert int(mapped.max()) == 0
    watch.stop()
    assert watch.rise < 32 << 20


def test_batches_run_over_epochs_in_the_trainers_own_order() -> None:
    rows = PackedRows(make_states(), ToyObjective(), "train", 32)
    epoch = len(rows.epoch_plan(0, 0).rows)
    batches = batches_of(rows, config(), epoch + 3)
    assert batches[:epoch] == [list(packed) for packed in rows.epoch_plan(0, 0).rows]
    assert batches[epoch:] == [list(packed) for packed in rows.epoch_plan(0, 1).rows[:3]]


def test_failed_child_is_quoted(tmp_path: Path) -> None:
    settings = BenchSettings(states="s", verifier="v")
    command = [sys.executable, "-c", "raise SystemExit('no such package: speculators')"]
    with pytest.raises(TrainingError, match="no such package: speculators"):
        _run(command, tmp_path / "x-result.json", settings, 60)
    done = [sys.executable, "-c", f"open({str(tmp_path / 'y-result.json')!r}, 'w').write('{json.dumps([1])}')"]
    assert _run(done, tmp_path / "y-result.json", settings, 60) == [1]


def test_table_names_both_and_their_ratios() -> None:
    side = Side(tokens_per_s=3000, runs=(3000,), peak_memory_mib=500, loss=2.0, eal=1.5)
    peer = side.model_copy(update={"tokens_per_s": 1000.0, "peak_memory_mib": 2000.0, "eal": None})
    report = BenchReport(
        steps=6, warmup_steps=2, row_tokens=8, draft_vocabulary=4, threads=1, ours=side, peer=peer, speed_ratio=3.0,
        memory_ratio=0.25, loss_ratio=1.0,
    )  # fmt: skip
    lines = report.table().splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["draftsmith", "peer", "ours"]
    assert "3.00x" in lines[3] and "0.25x" in lines[3]
