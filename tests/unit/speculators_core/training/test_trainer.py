from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch

from speculators_core.errors import Interrupted, TrainingError
from speculators_core.training import checkpoints
from speculators_core.training.callbacks.metrics_log import read_metrics
from speculators_core.training.callbacks.signals import Signals
from speculators_core.training.weights import trained_tensors
from tests.unit.speculators_core.training.toy import (
    MemoryStates,
    Recorder,
    Row,
    ToyDraft,
    config,
    make_states,
    make_trainer,
)


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trained_tensors(model).items()}


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def lines(output: Path) -> list[dict[str, object]]:
    noisy = ("time", "tokens_per_s", "wait_share", "eta_s", "seconds")
    return [{k: v for k, v in line.items() if k not in noisy} for line in read_metrics(output / "metrics.jsonl")]


def test_training_lowers_the_loss_and_leaves_frozen_parts_alone(tmp_path: Path) -> None:
    model = ToyDraft()
    frozen = model.lm_head.clone()
    make_trainer(tmp_path, config(epochs=12), model=model).fit()
    told = lines(tmp_path)
    losses = [line["loss"] for line in told if line["kind"] == "train"]
    assert losses[-1] < 0.85 * losses[0]
    assert torch.equal(model.lm_head, frozen)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("stop_at", [1, 4, 6, 11])
def test_interrupted_and_resumed_equals_uninterrupted_bit_for_bit(tmp_path: Path, stop_at: int, optimizer: str) -> None:
    """Mid-epoch too: an epoch has 5 steps here; noise in the forward pass makes the random state matter."""
    settings = config(
        gradient_accumulation=2,
        optimizer={"kind": optimizer, "learning_rate": 0.05},
        validation={"every_steps": 3},
        checkpoint={"every_steps": 4},
    )
    straight = make_trainer(tmp_path / "straight", settings)
    straight.fit()
    assert straight.position.step == straight.total_steps

    broken = make_trainer(tmp_path / "resumed", settings, extra=[Recorder(stop_at, "SIGTERM")])
    with pytest.raises(Interrupted, match=f"SIGTERM after step {stop_at}"):
        broken.fit()
    torch.manual_seed(999)  # a new process has another random state
    resumed = make_trainer(tmp_path / "resumed", settings, model=ToyDraft(seed=7))
    assert resumed.position.step == stop_at
    resumed.model.embed_tokens.weight.data.copy_(straight.model.embed_tokens.weight)  # frozen parts: from the verifier
    resumed.model.lm_head.data.copy_(straight.model.lm_head)
    resumed.fit()
    assert_same(weights(straight.model), weights(resumed.model))
    assert_same(straight.optimizers.state_tensors(), resumed.optimizers.state_tensors())
    assert straight.position == resumed.position
    assert lines(tmp_path / "straight") == lines(tmp_path / "resumed")


class Killed(BaseException):
    """As after a SIGKILL: nothing is saved."""


@pytest.mark.parametrize("validation", [{}, {"every_steps": 3}])
@pytest.mark.parametrize("row", [2, 12])
@pytest.mark.parametrize("killed", [False, True])
def test_stopped_in_a_validation_no_step_is_lost_and_the_rerun_validates_again(
    tmp_path: Path, killed: bool, row: int, validation: dict[str, int]
) -> None:
    """Rows of validations are counted through the run: in its first validation, and in its last."""
    checkpoint = {"every_steps": 3} if killed else {"every_steps": None, "every_epoch": False}
    settings = config(gradient_accumulation=2, validation=validation, checkpoint=checkpoint)
    straight = make_trainer(tmp_path / "straight", settings)
    straight.fit()
    broken = make_trainer(tmp_path / "resumed", settings)
    objective, walked = broken.callbacks[-1].validator.objective, []  # type: ignore[attr-defined]
    walk = objective.walk

    def stopped(*given):  # type: ignore[no-untyped-def]
        walked.append(broken.position.step)
        if len(walked) == row and killed:
            raise Killed
        if len(walked) == row:
            broken.interrupt("SIGTERM")
        return walk(*given)

    objective.walk = stopped
    with pytest.raises((Interrupted, Killed)):
        broken.fit()
    assert len(walked) == row, "it looks between rows"
    resumed = make_trainer(tmp_path / "resumed", settings)
    assert resumed.position.step == broken.position.step == walked[-1]
    resumed.fit()
    assert_same(weights(straight.model), weights(resumed.model))
    assert lines(tmp_path / "straight") == lines(tmp_path / "resumed")
    assert (
        checkpoints.load(tmp_path / "straight" / "best").state == checkpoints.load(tmp_path / "resumed" / "best").state
    )


@pytest.mark.parametrize("step", [6, 7])
def test_a_killed_run_goes_on_from_its_last_checkpoint_with_the_same_end(tmp_path: Path, step: int) -> None:
    class KillAt(Recorder):
        def on_step(self, trainer, report):  # type: ignore[no-untyped-def]
            if report.step == step:
                raise Killed

    settings = config(gradient_accumulation=2, checkpoint={"every_steps": 2})
    straight = make_trainer(tmp_path / "straight", settings)
    straight.fit()
    with pytest.raises(Killed):
        make_trainer(tmp_path / "killed", settings, extra=[KillAt()]).fit()
    again = make_trainer(tmp_path / "killed", settings)
    assert again.position.step == step - 1
    again.fit()
    assert_same(weights(straight.model), weights(again.model))
    assert lines(tmp_path / "straight") == lines(tmp_path / "killed")


def test_torn_newest_checkpoint_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = config(max_steps=8, checkpoint={"every_steps": 4})
    straight = make_trainer(tmp_path, settings)
    straight.fit()
    os.truncate(tmp_path / "checkpoints" / "step-00000008" / "optimizer.safetensors", 10)
    again = make_trainer(tmp_path, settings)
    assert again.position.step == 4
    assert "step-00000008 is damaged (optimizer.safetensors has 10 bytes" in caplog.text
    again.fit()
    assert_same(weights(straight.model), weights(again.model))


def test_max_steps_ends_the_run_and_the_last_weights_are_validated_and_saved(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, config(max_steps=3, epochs=9, checkpoint={"every_steps": 100}))
    trainer.fit()
    assert trainer.position.step == 3
    told = lines(tmp_path)
    assert [line["step"] for line in told if line["kind"] == "validation"] == [3]
    found, _ = checkpoints.latest(tmp_path / "checkpoints")
    assert found is not None and found.name == "step-00000003"
    again = make_trainer(tmp_path, config(max_steps=3, epochs=9, checkpoint={"every_steps": 100}))
    again.fit()
    assert again.position.step == 3 and lines(tmp_path) == told


def test_resume_with_other_settings_is_refused(tmp_path: Path) -> None:
    make_trainer(tmp_path, config(max_steps=2)).fit()
    with pytest.raises(TrainingError, match="other settings: optimizer, seed"):
        make_trainer(tmp_path, config(max_steps=2, seed=5, optimizer={"learning_rate": 0.5}))
    make_trainer(tmp_path, config(max_steps=2, log_every_steps=7, checkpoint={"keep": 9}))


def test_accumulated_rows_equal_one_wide_row(tmp_path: Path) -> None:
    """The loss is normalised by the step's supervised tokens, however unequal its rows are."""
    states = make_states(num_train=6, longest=12)
    results = []
    for row_tokens, accumulation in ((12, 6), (12 * 6, 1)):
        settings = config(row_tokens=row_tokens, gradient_accumulation=accumulation, max_steps=1, clip_norm=None)
        recorder = Recorder()
        output = tmp_path / str(row_tokens)
        make_trainer(output, settings, states=states, model=ToyDraft(noise=0.0), extra=[recorder]).fit()
        results.append((recorder.reports[0].metrics["loss"].mean, recorder.reports[0].grad_norm))
    assert results[0] == pytest.approx(results[1], rel=1e-5)


def test_not_finite_stops_with_the_batch_saved(tmp_path: Path) -> None:
    good = make_states()
    spoiled = good.row(5).hidden_states.clone()
    spoiled[3, 0, 0] = float("nan")
    rows = [good.row(i) for i in range(len(good.lengths))]
    rows[5] = Row(5, "train", rows[5].input_ids, rows[5].loss_mask, spoiled)
    trainer = make_trainer(tmp_path, config(), states=MemoryStates(rows), model=ToyDraft())
    with pytest.raises(TrainingError, match="not finite at step"):
        trainer.fit()
    (saved,) = (tmp_path / "non-finite").iterdir()
    tensors = safetensors.torch.load_file(saved)
    assert tensors["0.aux_TAH"].isnan().any()
    with safetensors.safe_open(saved, framework="pt") as file:
        assert "5" in file.metadata()["0"]
    for path in (tmp_path / "checkpoints").glob("step-*"):
        assert all(t.isfinite().all() for t in checkpoints.load(path).tensors["model"].values())


def test_early_stop_keeps_the_best_and_stays_stopped(tmp_path: Path) -> None:
    settings = config(
        epochs=40,
        optimizer={"learning_rate": 1e-9},  # nothing improves after the first validation
        validation={"every_steps": 2, "early_stop_patience": 2, "best_metric": "eal"},
    )
    trainer = make_trainer(tmp_path, settings)
    trainer.fit()
    assert trainer.position.step == 6 and trainer.stop_reason is not None
    told = [line for line in lines(tmp_path) if line["kind"] == "validation"]
    assert [line["best"] for line in told] == [True, False, False]
    assert checkpoints.load(tmp_path / "best").state["step"] == 2
    again = make_trainer(tmp_path, settings)
    again.fit()
    assert again.position.step == 6


def test_best_is_by_the_named_metric(tmp_path: Path) -> None:
    settings = config(epochs=6, validation={"best_metric": "loss"})
    make_trainer(tmp_path, settings).fit()
    told = [line for line in lines(tmp_path) if line["kind"] == "validation"]
    best = min(told, key=lambda line: line["loss"])
    state = checkpoints.load(tmp_path / "best").state
    assert state["step"] == best["step"] and state["validation"]["loss"] == best["loss"]


def test_validation_draws_the_same_every_time_and_leaves_the_random_state(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, config())
    validator = trainer.callbacks[-1].validator  # type: ignore[attr-defined]
    trainer.model.noise = 5.0
    before = torch.get_rng_state()
    first = validator(trainer.model.train(), trainer.autocast())
    assert torch.equal(before, torch.get_rng_state()) and trainer.model.training
    torch.manual_seed(1234)
    assert validator(trainer.model, trainer.autocast()) == first


def test_walked_and_mean_acceptance(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, config(epochs=12))
    trainer.fit()
    report = trainer.callbacks[-1].validator(trainer.model, trainer.autocast())  # type: ignore[attr-defined]
    assert report.drafts > 0 and len(report.per_position) == 3
    assert report.eal == pytest.approx(1.0 + sum(report.per_position))
    assert list(report.per_position) == sorted(report.per_position, reverse=True)
    assert report.eal_mean_positions == pytest.approx(1.0 + report.metrics["full_acc_0"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_raises(tmp_path: Path, number: signal.Signals) -> None:
    class SendAt(Recorder):
        def on_step(self, trainer, report):  # type: ignore[no-untyped-def]
            if report.step == 5:
                os.kill(os.getpid(), number)

    former = signal.getsignal(number)
    trainer = make_trainer(tmp_path, config(checkpoint={"every_steps": 100}), extra=[Signals(), SendAt()])
    with pytest.raises(Interrupted, match=f"{number.name} after step 5"):
        trainer.fit()
    assert signal.getsignal(number) is former
    found, _ = checkpoints.latest(tmp_path / "checkpoints")
    assert found is not None and found.name == "step-00000005"


def test_metrics_file_survives_a_torn_line(tmp_path: Path) -> None:
    settings = config(max_steps=4, checkpoint={"every_steps": 2})
    make_trainer(tmp_path, settings).fit()
    whole = lines(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    assert lines(tmp_path) == whole
    make_trainer(tmp_path, settings).fit()
    assert [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]


def test_bf16_autocast_keeps_fp32_masters(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, config(precision="bf16", max_steps=3))
    trainer.fit()
    saved = checkpoints.load(tmp_path / "checkpoints" / "step-00000003").tensors
    assert {t.dtype for t in saved["model"].values() if t.is_floating_point()} == {torch.float32}
    assert saved["optimizer"]["fc.weight.exp_avg_sq"].dtype == torch.float32


def test_rows_without_anything_to_learn_are_an_error_and_not_a_draft(tmp_path: Path) -> None:
    """Each reply is the row's first token, which no row of the shifted kind asks for."""
    rows = make_states()
    silent = [
        replace(row, loss_mask=torch.arange(len(row.input_ids)) == 0) if row.split == "train" else row
        for row in map(rows.row, range(len(rows.splits)))
    ]
    with pytest.raises(TrainingError, match="no training row holds anything to learn"):
        make_trainer(tmp_path, config(epochs=2), states=MemoryStates(silent)).fit()
