"""Streams of states: order, window, restarts, mismatches, what is kept; on real stores, from recorded states."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from hs_connectors.contract import Record
from hs_connectors.registry import open_backend, open_writer
from speculators_core.engine.remote import CaptureTerms, RecordStore
from speculators_core.errors import CaptureError, Interrupted
from speculators_core.states.book import AddressBook
from speculators_core.states.config import CaptureConfig, HiddenStatesConfig, OnlineRequest
from speculators_core.states.kept import choose_kept
from speculators_core.states.online import OnlineStates
from speculators_core.states.sweep import sweep
from tests.recorded_engine import RecordedEngine
from tests.unit.speculators_core.training.toy import (
    AUX,
    H,
    MemoryStates,
    Recorder,
    Row,
    config,
    make_states,
    make_trainer,
)

LAYERS = (1, 2, 4)
TERMS = CaptureTerms(layer_ids=LAYERS, states_dtype="float32", codec="none", verifier_fingerprint="f" * 64, context=32)
assert len(LAYERS) == AUX + 1


class Rows:
    """The rows of states in memory, without their states."""

    def __init__(self, states: MemoryStates) -> None:
        self._states = states
        self.num_rows = len(states.lengths)

    def row(self, index: int, /) -> Row:
        return self._states.row(index)


class World:
    """Recorded engines around one set of states, and streams from them."""

    def __init__(self, place: Path, held: ExitStack) -> None:
        self.place, self._held = place, held
        self.states = make_states()
        self.recorded = {tuple(self.row(i).input_ids.tolist()): self.row(i).hidden_states for i in range(29)}
        self.book = AddressBook(place / "engines.json")
        self.book.open(1)

    def row(self, position: int) -> Row:
        return self.states.row(position)

    def store(self, name: str = "records") -> RecordStore:
        return RecordStore(config={"root": str(self.place / name), "fsync": False})

    def engine(self, seat: str = "0", store: RecordStore | None = None, **faults) -> RecordedEngine:
        engine = RecordedEngine(self.recorded, store or self.store(f"records-{seat}"), TERMS, **faults)
        self._held.enter_context(engine)
        self.book.enter(seat, engine.runtime)
        return engine

    def stream(self, name: str = "kept", **settings) -> OnlineStates:
        mode = {"mode": "hybrid"} if "cache_gib" in settings else {"mode": "online"}
        capture = CaptureConfig(concurrency=4, record_timeout_s=2, retries=1)
        request = OnlineRequest(
            dataset="", dataset_digest="d", terms=TERMS, command=("serve",), hidden_size=H,
            book=str(self.book.path), cache=str(self.place / name), capture=capture,
            states=HiddenStatesConfig(**mode, **{"window_tokens": 60, "patience_s": 3, **settings}),
        )  # fmt: skip
        return self._held.enter_context(closing(OnlineStates(Rows(self.states), request)))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with ExitStack() as held:
        yield World(tmp_path, held)


def read(stream: OnlineStates, position: int) -> torch.Tensor:
    return stream.row(position).hidden_states


def left_behind(world: World) -> list[str]:
    return sorted(path.name for path in world.place.glob("records*/*") if path.name != "engine.json")


def test_rows_come_in_the_readers_order_whatever_order_they_arrive_in(world: World):
    draws = random.Random(0)
    engines = [world.engine(str(seat), delay_s=lambda: draws.random() / 50) for seat in range(2)]
    stream = world.stream()
    order = random.Random(1).sample(range(29), 29)
    with stream.expecting(order):
        for position in order:
            row, expected = stream.row(position), world.row(position)
            assert (row.index, row.split) == (expected.index, expected.split)
            assert torch.equal(row.input_ids, expected.input_ids) and torch.equal(row.loss_mask, expected.loss_mask)
            assert torch.equal(row.hidden_states, expected.hidden_states)
    stream.close()
    asked = [ids for engine in engines for ids in engine.asked]
    assert sorted(asked) == sorted(world.recorded) and all(engine.asked for engine in engines)
    assert left_behind(world) == []


def test_no_more_is_asked_for_than_the_window_holds(world: World):
    engine = world.engine()
    stream = world.stream(window_tokens=40)
    with stream.expecting(range(24)):
        read(stream, 0)
        time.sleep(0.3)  # nobody reads on: the engine rests
        ahead = len(engine.asked)
        assert 1 < ahead < 24
        assert sum(stream.lengths[position] for position in range(1, ahead)) <= 40
    time.sleep(0.1)
    assert len(engine.asked) == ahead


def test_what_was_not_announced_is_asked_for_at_once(world: World):
    world.engine()
    assert torch.equal(world.stream().row(5).hidden_states, world.row(5).hidden_states)


def trained(world: World, output: Path, states, **changes):
    trainer = make_trainer(output, config(**changes), states=states)
    trainer.fit()
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys() and [name for name in a if not torch.equal(a[name], b[name])] == []


def test_training_ends_with_the_same_bits_offline_online_and_hybrid(world: World, tmp_path: Path):
    offline = trained(world, tmp_path / "offline", world.states)
    engine = world.engine()
    assert_same(offline, trained(world, tmp_path / "online", world.stream("a")))
    held_out = sum(split == "validation" for split in world.states.splits)
    assert 3 * 24 + held_out <= len(engine.asked) <= 3 * 24 + held_out + 2  # and a look at a first row, or two
    engine.asked.clear()
    assert_same(offline, trained(world, tmp_path / "hybrid", world.stream("b", cache_gib=1)))
    assert len(engine.asked) == 29, "the second and third epoch ask for nothing"
    assert left_behind(world) == []


def test_interrupted_and_resumed_is_as_uninterrupted_and_what_was_kept_is_not_asked_for_again(
    world: World, tmp_path: Path
):
    engine = world.engine()
    whole = trained(world, tmp_path / "whole", world.states)
    quota = 24 * 10 * (len(LAYERS) * H * 4 + 9) / 2**30  # not all of them
    stream = world.stream(cache_gib=quota)
    with pytest.raises(Interrupted):
        make_trainer(tmp_path / "run", config(), states=stream, extra=[Recorder(14, "SIGTERM")]).fit()
    stream.close()
    before = len(engine.asked)
    again = world.stream(cache_gib=quota)
    assert_same(whole, trained(world, tmp_path / "run", again))
    kept = choose_kept(again.lengths, again.splits, again.facts.bytes_per_token, quota * 2**30)
    assert 5 < len(kept) < 29
    assert not {tuple(world.row(position).input_ids.tolist()) for position in kept} & set(engine.asked[before:])


def test_a_stop_is_heard_while_no_engine_answers_and_what_was_learnt_is_saved(world: World, tmp_path: Path):
    whole = trained(world, tmp_path / "whole", world.states)
    engine = world.engine(delay_s=lambda: 0.02)
    stream = world.stream(patience_s=600)
    trainer = make_trainer(tmp_path / "run", config(), states=stream)

    def stop() -> float:
        while trainer.position.step < 4:
            time.sleep(0.005)
        engine.stop()
        time.sleep(1)  # the window is empty by now
        trainer.interrupt("SIGTERM")
        return time.monotonic()

    with ThreadPoolExecutor(1) as pool:
        stopped = pool.submit(stop)
        with pytest.raises(Interrupted, match=r"by SIGTERM after step \d"):
            trainer.fit()
    assert time.monotonic() - stopped.result() < 10
    stream.close()
    world.engine()
    assert_same(whole, trained(world, tmp_path / "run", world.stream()))


def test_an_engine_that_dies_in_mid_epoch_comes_back_on_another_port(world: World, tmp_path: Path):
    offline = trained(world, tmp_path / "offline", world.states)
    first = world.engine(delay_s=lambda: 0.01)

    def restart() -> None:
        while len(first.asked) < 20:
            time.sleep(0.005)
        first.stop()
        world.book.strike("0")
        time.sleep(0.5)
        world.engine()

    killer = threading.Thread(target=restart)
    killer.start()
    assert_same(offline, trained(world, tmp_path / "online", world.stream(patience_s=30)))
    killer.join()
    assert left_behind(world) == []


def test_one_of_two_engines_is_enough_and_the_other_is_set_aside(world: World):
    dead, alive = world.engine("0"), world.engine("1")
    dead.stop()
    stream = world.stream()
    with stream.expecting(range(29)):
        for position in range(29):
            assert torch.equal(stream.row(position).hidden_states, world.row(position).hidden_states)
    assert len(alive.asked) == 29


def test_an_engine_that_was_started_again_gets_work_while_another_is_healthy(world: World):
    first, other = world.engine("0"), world.engine("1")
    stream = world.stream()
    first.stop()
    world.book.strike("0")
    read(stream, 0)
    again = world.engine("0")
    deadline = time.monotonic() + 10
    with ThreadPoolExecutor(4) as readers:
        while not again.asked and time.monotonic() < deadline:
            list(readers.map(partial(read, stream), range(1, 9)))
    assert again.asked and other.asked


def test_without_any_engine_the_cause_is_told_to_every_reader(world: World):
    world.engine().stop()
    stream = world.stream(patience_s=1)
    with stream.expecting(range(29)):
        for position in (0, 7):
            with pytest.raises(CaptureError, match=r"(?s)no engine answered for 1 s: no vLLM server answers.*mend"):
                read(stream, position)


def test_an_engine_that_is_being_started_is_waited_for_beyond_all_patience(world: World):
    world.engine().stop()
    world.book.strike("0")
    stream = world.stream(patience_s=0.2)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read, stream, 3)
        time.sleep(1.5)
        world.engine()
        assert torch.equal(reading.result(), world.row(3).hidden_states)


def test_where_nobody_starts_it_again_there_is_no_waiting(world: World):
    world.engine().stop()
    stream = world.stream(patience_s=60)
    world.book.strike("0", "the vLLM server died (status 137)")
    with pytest.raises(CaptureError, match="no engine is left: the vLLM server died"):
        read(stream, 0)


@pytest.mark.parametrize(
    ("said", "term"),
    [
        ({"layer_ids": [1, 3, 4]}, "layer_ids"),
        ({"states_dtype": "bfloat16"}, "states_dtype"),
        ({"norm_point": "after the final norm"}, "norm_point"),
        ({"verifier_fingerprint": "0" * 64}, "verifier_fingerprint"),
        ({"codec": "fp8"}, "codec"),
        ({"max_model_len": 8}, "context"),
    ],
)
def test_an_engine_of_other_terms_is_refused_before_the_first_record(world: World, said: dict, term: str):
    engine = world.engine(announced=said)
    with pytest.raises(CaptureError, match=rf"(?s)than is wanted: {term}\n.*≠ +{term}"):
        read(world.stream(), 0)
    assert engine.asked == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_ids": (1, 3, 4)}, r"layers \[1, 3, 4\] were captured, wanted are \[1, 2, 4\]"),
        ({"verifier_fingerprint": "0" * 64}, "captured from verifier 000000000000"),
    ],
)
def test_a_record_of_another_verifier_or_of_other_layers_ends_the_run(world: World, tmp_path: Path, change, message):
    """In mid-epoch, behind an announcement that fits: the run stops between two steps, and says whose record it was."""
    seen = iter(range(1000))
    world.engine(change=lambda record: replace(record, **change) if next(seen) > 12 else record)
    with pytest.raises(CaptureError, match=message):
        trained(world, tmp_path / "run", world.stream())
    assert not (tmp_path / "run" / "result.json").exists()


def test_a_record_that_never_comes_is_asked_for_again_and_a_row_that_never_comes_is_named(world: World):
    lost = [tuple(world.row(3).input_ids.tolist())]

    def lose(record: Record) -> Record | None:
        ids = tuple(record.token_ids.tolist())
        return None if ids in lost and (lost.remove(ids) or True) else record

    engine = world.engine(change=lose)
    assert torch.equal(world.stream().row(3).hidden_states, world.row(3).hidden_states)
    assert len(engine.asked) == 2
    lost += [engine.asked[0]] * 9
    with pytest.raises(CaptureError, match=r"row 3 could not be captured in 2 tries: record \S+ of \S+ did not appear"):
        read(world.stream(), 3)


def test_two_trainers_on_one_engine_and_one_store_do_not_disturb_each_other(world: World, tmp_path: Path):
    offline = trained(world, tmp_path / "offline", world.states)
    world.engine(store=world.store())
    # the other one only reads: two processes in life, and the model's noise is drawn from one generator here
    with closing(world.stream("other")) as other, other.expecting(range(29)):
        assert_same(offline, trained(world, tmp_path / "run", world.stream()))
        for position in range(29):
            assert torch.equal(read(other, position), world.row(position).hidden_states)
    assert left_behind(world) == []


def test_a_torn_kept_row_is_asked_for_again(world: World):
    engine = world.engine()
    stream = world.stream(cache_gib=1)
    read(stream, 2)
    path = world.place / "kept" / "row-2.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 1
    path.write_bytes(raw)
    assert torch.equal(world.stream(cache_gib=1).row(2).hidden_states, world.row(2).hidden_states)
    assert len(engine.asked) == 2
    assert path.read_bytes() != bytes(raw)


def test_held_out_rows_are_kept_and_then_the_first_that_fit():
    lengths, splits = [5, 3, 9, 2, 1], ["train", "validation", "train", "train", "train"]
    assert choose_kept(lengths, splits, 10, 0) == {1}
    assert choose_kept(lengths, splits, 10, 79) == {0, 1, 3}
    assert choose_kept(lengths, splits, 10, 1000) == {0, 1, 2, 3, 4}


def test_records_of_dead_readers_are_swept_and_living_ones_stay(world: World):
    store = world.store()
    writer = open_writer(store.backend, store.config)
    row = world.row(0)
    record = Record(row.hidden_states, row.input_ids, LAYERS, "float32", "f" * 64)
    for key in ("old", "new"):
        writer.put(key, record)
    long_ago = time.time() - 100
    (world.place / "records" / "a-note.error.json").write_text("[]")
    for name in ("old.safetensors", "a-note.error.json"):
        os.utime(world.place / "records" / name, (long_ago, long_ago))
    assert sweep(store, lease_s=50) == 1
    left = [entry.key for entry in open_backend(store.backend, store.config).entries()]
    assert left == ["a-note", "new"], "what is not ours stays, and ends no sweep"
