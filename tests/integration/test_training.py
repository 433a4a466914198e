"""Training from request to result with a real algorithm, as the child process that a flow starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from speculators_core.build import train
from speculators_core.drafts import export
from speculators_core.errors import BudgetError, ConfigError, Interrupted, TrainingError
from speculators_core.formats.card import ModelCard
from speculators_core.states.collect import Collector
from speculators_core.states.shards import RowContent, StatesFacts
from speculators_core.training import checkpoints
from speculators_core.training.callbacks.metrics_log import read_metrics
from speculators_core.training.request import TrainRequest
from speculators_core.training_process import EXIT_INTERRUPTED, read_outcome, run_training, train_command
from tests.environment import ROOT, child_environment

VOCABULARY, HIDDEN, LAYERS = 96, 32, 6
ALGORITHM = {"kind": "eagle3"}


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False,
        initializer_range=0.2,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("verifier")
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


class Rows:
    """Rows in memory, as a capture reads them."""

    def __init__(self, rows: list[RowContent]) -> None:
        self._rows = rows
        self.num_rows = len(rows)

    def row(self, index: int) -> RowContent:
        return self._rows[index]


@pytest.fixture(scope="module")
def states(verifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 training and 4 validation rows: prompts, and what the verifier answers greedily."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(verifier, dtype=torch.float32).eval()
    directory = tmp_path_factory.mktemp("states")
    draws = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (28, 5), generator=draws)
    last: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, args: last.append(args[0]))
    with torch.no_grad():
        for _ in range(20):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
        seen = model(ids, output_hidden_states=True).hidden_states
    hook.remove()
    hidden = torch.stack([seen[2], seen[3], seen[4], last[-1]], dim=2).to(torch.bfloat16)
    rows = []
    for index in range(28):
        length = int(torch.randint(12, 26, (1,), generator=draws))
        mask = torch.arange(length) >= 5
        split = "validation" if index % 7 == 6 else "train"
        rows.append(RowContent(index, split, ids[index, :length], mask, hidden[index, :length]))
    facts = StatesFacts(
        layer_ids=(2, 3, 4, LAYERS), hidden_size=HIDDEN, dtype="bfloat16", verifier_fingerprint="tiny", source="hf"
    )
    collector = Collector(Rows(rows), facts, directory, 10_000)
    for row in rows:
        collector.add(row)
    collector.finish({})
    return directory


@pytest.fixture
def ask(verifier: Path, states: Path, tmp_path: Path) -> Callable[..., TrainRequest]:
    def make(name: str = "run", **changes: Any) -> TrainRequest:
        training: dict[str, Any] = {
            "epochs": 4,
            "row_tokens": 64,
            "precision": "fp32",
            "log_every_steps": 1,
            "threads": 1,
            "optimizer": {"learning_rate": 0.003},
            "checkpoint": {"every_steps": 3, "keep_when_finished": True},
        }
        whole = {
            "states": str(states),
            "verifier": str(verifier),
            "algorithm": {**ALGORITHM, "aux_layers": (2, 3, 4)},
            "training": {**training, **changes.pop("training", {})},
            "output": str(tmp_path / name),
        }
        return TrainRequest.model_validate({**whole, **changes})

    return make


def start(request: TrainRequest, log: Path) -> subprocess.Popen[bytes]:
    output = Path(request.output)
    output.mkdir(parents=True, exist_ok=True)
    file = output.parent / f"{output.name}.json"
    file.write_text(request.model_dump_json())
    with log.open("ab") as stream:
        return subprocess.Popen(
            train_command(file, python=sys.executable), cwd=ROOT, env=child_environment(),
            stdout=stream, stderr=stream, start_new_session=True,
        )  # fmt: skip


def wait_for_step(output: Path, step: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        if any(line["step"] >= step for line in read_metrics(output / "metrics.jsonl")):
            return
        assert process.poll() is None, log.read_text()
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached: {log.read_text()}")


def last_checkpoint(output: str | Path) -> dict[str, torch.Tensor]:
    found, reports = checkpoints.latest(Path(output) / "checkpoints")
    assert found is not None and not reports
    tensors = checkpoints.load(found).tensors
    return {f"{part}/{name}": value for part in ("model", "optimizer") for name, value in tensors[part].items()}


def last_step(output: str | Path) -> int:
    return max(line["step"] for line in read_metrics(Path(output) / "metrics.jsonl"))


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys() and len(a) > 20
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def test_overfits_a_batch_and_promises_what_it_walks(ask: Callable[..., TrainRequest]) -> None:
    quiet = {"checkpoint": {"every_steps": None, "every_epoch": False}, "validation": {"every_steps": 1000}}
    rate = {"learning_rate": 0.01}
    request = ask(training={"epochs": 150, "row_tokens": 512, "optimizer": rate, "log_every_steps": 10, **quiet})
    report = train(request)
    told = read_metrics(Path(request.output) / "metrics.jsonl")
    losses = [line["loss"] for line in told if line["kind"] == "train"]
    assert losses[-1] < 0.2 * losses[0]
    last = [line for line in told if line["kind"] == "train"][-1]
    assert last["metrics"]["full_acc_0"] > 0.6
    assert report.validation["eal"] == pytest.approx(1 + sum(report.validation["per_position"]))
    assert report.epochs == 150 and report.tokens > 0
    assert {path.name for path in Path(request.output).iterdir()} >= {"best", "result.json", "metrics.jsonl"}


def test_killed_in_the_middle_the_rerun_ends_as_if_nothing_had_happened(
    ask: Callable[..., TrainRequest], tmp_path: Path
) -> None:
    straight = ask("straight", training={"epochs": 12})
    train(straight)
    killed = ask("killed", training={"epochs": 12})
    log = tmp_path / "log"
    child = start(killed, log)
    wait_for_step(Path(killed.output), 8, child, log)
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    with pytest.raises(TrainingError, match="ended without a word"):
        read_outcome(Path(killed.output))
    child = start(killed, log)
    assert child.wait(timeout=120) == 0, log.read_text()
    assert "going on from checkpoint=step-" in log.read_text()
    assert_same(last_checkpoint(straight.output), last_checkpoint(killed.output))
    ours, theirs = (json.loads((Path(r.output) / "result.json").read_text()) for r in (straight, killed))
    for report in (ours, theirs):
        del report["seconds"], report["tokens_per_s"]
    assert ours == theirs


def test_a_used_up_budget_ends_at_a_checkpoint_and_nothing_is_lost(
    ask: Callable[..., TrainRequest], tmp_path: Path
) -> None:
    """What stops it is raised by the progress callback; the same request goes on and ends as if it never had been."""
    long = {"epochs": 60}
    uninterrupted, request = ask("whole", training=long), ask("budgeted", training=long)
    train(uninterrupted)
    reached: list[int] = []

    def used_up(done: int, total: int) -> None:
        reached.append(done)
        raise BudgetError("used up")

    with pytest.raises(BudgetError):
        run_training(request, tmp_path / "home", used_up)
    found, _ = checkpoints.latest(Path(request.output) / "checkpoints")
    assert found is not None
    assert reached[0] <= checkpoints.load(found).state["position"]["step"] < last_step(uninterrupted.output)
    run_training(request, tmp_path / "home")
    assert_same(last_checkpoint(uninterrupted.output), last_checkpoint(request.output))


@pytest.mark.parametrize("processes", [1, 2])
def test_sigterm_saves_exits_distinctly_and_resumes(
    ask: Callable[..., TrainRequest], tmp_path: Path, processes: int
) -> None:
    """To the whole group, as a supervisor sends it: torchrun's own forwarding must not count as a second one."""
    request = ask(training={"epochs": 400, "processes": processes, "checkpoint": {"every_steps": None}})
    output, log = Path(request.output), tmp_path / "log"
    child = start(request, log)
    wait_for_step(output, 5, child, log)
    os.killpg(child.pid, signal.SIGTERM)
    assert child.wait(timeout=60) == EXIT_INTERRUPTED, log.read_text()
    with pytest.raises(Interrupted, match="stopped by"):
        read_outcome(output)
    found, _ = checkpoints.latest(output / "checkpoints")
    assert found is not None
    saved = checkpoints.load(found).state["position"]["step"]
    assert saved >= 5
    child = start(request, log)
    wait_for_step(output, saved + 1, child, log)
    os.killpg(child.pid, signal.SIGTERM)
    assert child.wait(timeout=60) == EXIT_INTERRUPTED, log.read_text()
    assert f"step={saved}" in log.read_text()


def test_two_processes_equal_one_that_accumulates(ask: Callable[..., TrainRequest], tmp_path: Path) -> None:
    alone = ask("alone", training={"epochs": 3, "gradient_accumulation": 2})
    pair = ask("pair", training={"epochs": 3, "processes": 2})
    train(alone)
    log = tmp_path / "log"
    assert start(pair, log).wait(timeout=180) == 0, log.read_text()
    ours, theirs = (read_metrics(Path(request.output) / "metrics.jsonl") for request in (alone, pair))
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["tokens"] == other["tokens"]
        assert mine["loss"] == pytest.approx(other["loss"], rel=2e-4)
        if mine["kind"] == "train":
            assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=2e-3)
    a, b = last_checkpoint(alone.output), last_checkpoint(pair.output)
    for name in (name for name in a if name.startswith("model/") and a[name].is_floating_point()):
        torch.testing.assert_close(a[name], b[name], rtol=1e-3, atol=2e-4, msg=name)


def test_export_and_warm_start(ask: Callable[..., TrainRequest], tmp_path: Path) -> None:
    request = ask(draft_vocabulary_size=48)
    train(request)
    draft = export(request, Path(request.output), "org/verifier", tmp_path / "draft", ModelCard(title="t"))
    assert {path.name for path in draft.iterdir()} == {"config.json", "model.safetensors", "README.md"}
    best = safetensors.torch.load_file(Path(request.output) / "best" / "model.safetensors")
    exported = safetensors.torch.load_file(draft / "model.safetensors")
    torch.testing.assert_close(exported["fc.weight"], best["fc.weight"].to(torch.bfloat16))
    assert exported["d2t"].shape == (48,)

    for source, tolerance in ((draft, 0.05), (Path(request.output) / "best", 1e-6)):
        rate = {"optimizer": {"learning_rate": 1e-12}, "epochs": 1}
        again = ask(f"warm-{source.name}", draft_vocabulary_size=48, warm_start=str(source), training=rate)
        report = train(again)
        assert report.warm_start
        expected = json.loads((Path(request.output) / "result.json").read_text())["validation"]["loss"]
        assert report.validation["loss"] == pytest.approx(expected, rel=tolerance)
    # the draft's own choice of tokens stands, also where the rows would choose others; but not where tokens changed
    tensors = safetensors.torch.load_file(draft / "model.safetensors")
    shifted = tensors["t2d"].roll(1)
    kept = shifted.nonzero().flatten()
    tensors |= {"t2d": shifted, "d2t": kept - torch.arange(48)}
    safetensors.torch.save_file(tensors, draft / "model.safetensors")
    for head in (True, False):
        asked = {"warm_start": str(draft), "warm_head": head, "training": {"max_steps": 1}}
        begun = ask(f"vocabulary-{head}", draft_vocabulary_size=48, **asked)
        train(begun)
        chosen = safetensors.torch.load_file(Path(begun.output) / "draft_vocabulary.safetensors")
        assert torch.equal(chosen["t2d"], shifted) == head

    other = ask("other", warm_start=str(draft), algorithm={**ALGORITHM, "aux_layers": (2, 3)})
    with pytest.raises(ConfigError, match=r"training\.warm_start: .* does not fit: fc\.weight"):
        train(other)
    with pytest.raises(ConfigError, match=r"holds no model\.safetensors"):
        train(ask("none", warm_start=str(tmp_path)))


def test_only_the_layers_that_the_algorithm_reads_are_used(ask: Callable[..., TrainRequest]) -> None:
    report = train(ask("two", algorithm={**ALGORITHM, "aux_layers": (2, 4)}, training={"epochs": 1}))
    assert report.steps > 0
    with pytest.raises(ConfigError, match=r"lacks layers \[1\]; it holds \[2, 3, 4, 6\]"):
        train(ask("lacking", algorithm={**ALGORITHM, "aux_layers": (1, 4)}))


def test_a_finished_run_is_not_trained_again(ask: Callable[..., TrainRequest]) -> None:
    request = ask(training={"epochs": 1})
    first = train(request)
    before = (Path(request.output) / "metrics.jsonl").read_text()
    assert train(request) == first
    assert (Path(request.output) / "metrics.jsonl").read_text() == before


def test_an_output_directory_belongs_to_one_run(ask: Callable[..., TrainRequest]) -> None:
    """Neither a result nor a checkpoint of another draft is taken for this one's."""
    train(ask(training={"epochs": 1}))
    with pytest.raises(TrainingError, match="holds a run with other algorithm, draft_vocabulary_size"):
        train(ask(draft_vocabulary_size=48, algorithm={**ALGORITHM, "aux_layers": (2, 3, 4), "ttt_steps": 2}))


def test_failures_reach_the_parent_as_themselves(ask: Callable[..., TrainRequest], tmp_path: Path) -> None:
    request = ask(training={"optimizer": {"learning_rate": 1e30}, "clip_norm": None})
    log = tmp_path / "log"
    assert start(request, log).wait(timeout=60) == 1
    with pytest.raises(TrainingError, match="not finite at step"):
        read_outcome(Path(request.output))


@pytest.mark.trial
def test_the_peer_trains_on_the_same_rows(states: Path, verifier: Path, tmp_path: Path) -> None:
    """`bench train --against-peer` end to end at a tiny size: both run, learn alike, and are measured."""
    from speculators_core.bench.setup import BenchSettings
    from speculators_core.bench.training import bench_training

    peer = ROOT / ".venv-peer" / "bin" / "python"
    if not peer.exists():
        pytest.skip("no environment of the peer: python -m venv .venv-peer, then install speculators==0.9.0")
    settings = BenchSettings(
        states=str(states), verifier=str(verifier), draft_vocabulary=64, row_tokens=128, steps=30, warmup_steps=5,
        runs=1, threads=1, learning_rate=0.003,
    )  # fmt: skip
    report = bench_training(peer, tmp_path / "bench", settings)
    assert report.ours.loss < 1.5 * report.peer.loss  # a few rows: the real sizes are for `bench train`
    assert report.ours.tokens_per_s > 0 and report.peer.peak_memory_mib > 0
    assert report.table().count("\n") == 3
