"""Training from request to result on streamed states: a real algorithm, child processes, several ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from hs_connectors.contract import Record
from hs_connectors.registry import open_backend
from speculators_core.build import train
from speculators_core.data.rows import RowRecord, RowWriter
from speculators_core.engine.remote import CaptureTerms, RecordStore
from speculators_core.errors import CaptureError, TrainingError
from speculators_core.states.book import AddressBook
from speculators_core.states.config import CaptureConfig, HiddenStatesConfig, OnlineRequest
from speculators_core.states.sets import StateSet
from speculators_core.training.request import TrainRequest
from speculators_core.training_process import read_outcome
from tests.contract.test_backends import CONFIGS, backend
from tests.integration.test_training import (
    HIDDEN,
    ask,
    assert_same,
    last_checkpoint,
    start,
    states,
    verifier,
    wait_for_step,
)
from tests.recorded_engine import RecordedEngine

__all__ = ["ask", "backend", "states", "verifier"]  # fixtures
LONGEST = 32


@pytest.fixture
def stream(
    ask: Callable[..., TrainRequest],
    states: Path,
    tmp_path: Path,
) -> Any:
    """The same request, over a recorded engine of the same states: `stream(name, mode=…, change=…, training=…)`."""
    captured = StateSet.open(states)
    writer = RowWriter()
    for row in captured.rows():
        record = RowRecord(f"r{row.index}", "all", row.split, f"c{row.index}", (1,))  # type: ignore[arg-type]
        writer.add(record, row.input_ids.tolist(), row.loss_mask.int().tolist())
    writer.write(tmp_path / "rows", [], [], {})
    recorded = {tuple(row.input_ids.tolist()): row.hidden_states.clone() for row in captured.rows()}
    facts = captured.facts
    with ExitStack() as held:

        def make(name: str, *, store: RecordStore | None = None, codec: str = "none", **changes: Any) -> TrainRequest:
            terms = CaptureTerms(
                layer_ids=facts.layer_ids, states_dtype=facts.dtype, codec=codec,
                verifier_fingerprint=facts.verifier_fingerprint, context=LONGEST,
            )  # fmt: skip
            store = store or RecordStore(config={"root": str(tmp_path / f"records-{name}"), "fsync": False})
            engine = RecordedEngine(recorded, store, terms, change=changes.pop("change", lambda record: record))
            held.enter_context(engine)
            book = AddressBook(tmp_path / f"{name}.book.json")
            book.open(1)
            book.enter("0", engine.runtime)
            mode = {"mode": "hybrid", "cache_gib": 1.0} if changes.pop("hybrid", False) else {"mode": "online"}
            request = ask(name, **changes)
            online = OnlineRequest(
                dataset=str(tmp_path / "rows"), dataset_digest="rows", terms=terms, command=("serve",),
                hidden_size=HIDDEN, book=str(book.path), cache=str(tmp_path / f"kept-{name}"),
                capture=CaptureConfig(concurrency=4, record_timeout_s=2, codec=codec, retries=1),
                states=HiddenStatesConfig(window_tokens=200, patience_s=20, **mode),
                ranks=request.training.processes,
            )  # fmt: skip
            make.engine = engine  # type: ignore[attr-defined]
            return request.model_copy(update={"states": "", "online": online})

        yield make


def test_the_same_draft_comes_out_offline_online_and_hybrid(
    ask: Callable[..., TrainRequest],
    stream: Any,
) -> None:
    """Draft vocabulary, data order, validation, weights and optimiser: bit for bit."""
    offline = ask("offline", draft_vocabulary_size=48)
    expected = train(offline)
    for name, hybrid in (("online", False), ("hybrid", True)):
        request = stream(name, hybrid=hybrid, draft_vocabulary_size=48)
        found = train(request)
        assert found.validation == expected.validation and found.tokens == expected.tokens
        assert_same(last_checkpoint(offline.output), last_checkpoint(request.output))


def test_the_same_draft_comes_out_over_every_backend_and_nothing_stays_in_the_store(
    backend: tuple[str, Any],
    ask: Callable[..., TrainRequest],
    stream: Any,
    tmp_path: Path,
) -> None:
    name, service = backend
    store = RecordStore(backend=name, config=dict(CONFIGS[name](str(tmp_path), service)))
    offline, request = ask("offline", training={"epochs": 1}), stream(name, store=store, training={"epochs": 1})
    train(offline)
    train(request)
    assert_same(last_checkpoint(offline.output), last_checkpoint(request.output))
    assert list(open_backend(name, store.config).entries()) == []


def test_a_draft_learns_as_much_from_fp8(ask: Callable[..., TrainRequest], stream: Any) -> None:
    """Where training is steady: at high rates a last bit may send it elsewhere, whatever the codec."""
    gently = {"epochs": 2, "optimizer": {"learning_rate": 3e-4}}
    expected = train(ask("plain", training=gently)).validation["loss"]
    found = train(stream("fp8", codec="fp8", training=gently)).validation["loss"]
    assert found != expected and found == pytest.approx(expected, rel=0.005)


def test_a_row_that_never_comes_ends_every_rank_with_the_cause(stream: Any, tmp_path: Path) -> None:
    wanted = iter(range(1000))

    def lose(record: Record) -> Record | None:
        return record if next(wanted) < 40 else None

    request = stream("pair", change=lose, training={"processes": 2, "epochs": 40})
    log = tmp_path / "log"
    assert start(request, log).wait(timeout=120) == 1, log.read_text()
    with pytest.raises(CaptureError, match=r"rank \d: .*did not appear"):
        read_outcome(Path(request.output))
    told = log.read_text()
    assert not (Path(request.output) / "result.json").exists()
    assert told.count("CaptureError") == 0 and "Connection closed" not in told


def test_a_second_trainer_is_told_that_one_is_at_work(
    ask: Callable[..., TrainRequest],
    tmp_path: Path,
) -> None:
    request, log = ask(training={"epochs": 400}), tmp_path / "log"
    child = start(request, log)
    try:
        wait_for_step(Path(request.output), 2, child, log)
        with pytest.raises(TrainingError, match="another process trains into"):
            train(request)
    finally:
        child.terminate()
        child.wait()


def test_layers_that_an_algorithm_does_not_read_are_left_out(stream: Any) -> None:
    request = stream("two", algorithm={"kind": "eagle3", "aux_layers": (2, 4)}, training={"epochs": 1})
    assert train(request).steps > 0
    assert torch.isfinite(last_checkpoint(request.output)["model/fc.weight"]).all()
