"""The conformance suite of backends, for anybody who writes one.

    from hs_connectors.testing import BackendContract

    class TestMine(BackendContract):
        def make_config(self, tmp_path):
            return {"root": str(tmp_path)}
        backend_name = "mine"

pytest collects the methods. Needs nothing but pytest's `tmp_path`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from hs_connectors.codecs import CODECS
from hs_connectors.contract import Handle, Payload, Reader, Record, Writer
from hs_connectors.errors import (
    CaptureFailed,
    RecordCorrupt,
    RecordError,
    RecordNotFinite,
    RecordTimeout,
    SettingsError,
    StorageError,
)
from hs_connectors.record import pack, unpack
from hs_connectors.registry import open_backend, open_reader, open_writer
from hs_connectors.upkeep import check, collect, copy

HOSTILE_KEYS = ("", ".", "..", "../up", "/etc/passwd", "a/b", "a\\b", "a.error", "a\x00b", "x" * 129, "é", "a\n")


def make_record(num_tokens: int = 7, seed: int = 0) -> Record:
    """A small record: 3 layers, hidden size 5, bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    return Record(
        hidden_states=torch.randn(num_tokens, 3, 5, generator=generator).bfloat16(),
        token_ids=torch.randint(0, 1000, (num_tokens,), generator=generator),
        layer_ids=(1, 4, 8),
        dtype="bfloat16",
        verifier_fingerprint="test",
        extra={"seed": str(seed)},
    )


def assert_same(got: Record, expected: Record) -> None:
    """Every field equal, states bit for bit."""
    assert torch.equal(got.hidden_states, expected.hidden_states)
    assert torch.equal(got.token_ids, expected.token_ids)
    fields = ("layer_ids", "dtype", "verifier_fingerprint", "extra")
    assert [getattr(got, f) for f in fields] == [getattr(expected, f) for f in fields]


class BackendContract:
    """What every backend must do; subclass it, name the backend and make its configuration."""

    backend_name: str

    def make_config(self, tmp_path: Path) -> Mapping[str, Any]:
        """A configuration for a fresh, empty store."""
        raise NotImplementedError

    def lay_foreign(self, tmp_path: Path) -> Callable[[], object]:
        """Lay other people's things into the prepared store under the names of records; what looks at them there.

        Nothing, as here, in a store where nobody else can write.
        """
        return lambda: None

    def open(self, tmp_path: Path) -> tuple[Writer, Reader]:
        """A writer and a reader of the same store, opened apart as two processes would."""
        config = self.make_config(tmp_path)
        return open_writer(self.backend_name, config), open_reader(self.backend_name, config)

    def test_a_record_comes_back_bit_for_bit(self, tmp_path: Path) -> None:
        """Writer and reader agree, through the handle's JSON."""
        writer, reader = self.open(tmp_path)
        handle = Handle.from_json(writer.put("key", make_record()).to_json())
        assert_same(reader.get(handle, 1), make_record())
        assert_same(reader.get(handle, 1), make_record())

    def test_a_reader_waits_for_a_record(self, tmp_path: Path) -> None:
        """It may be asked before the writer is done."""
        writer, reader = self.open(tmp_path)
        late = threading.Timer(0.2, writer.put, ("key", make_record()))
        late.start()
        assert_same(reader.get(Handle(self.backend_name, "key"), 10), make_record())
        late.join()

    def test_a_reader_stops_waiting_at_an_error(self, tmp_path: Path) -> None:
        """The writer's message reaches it at once."""
        writer, reader = self.open(tmp_path)
        threading.Timer(0.1, writer.fail, ("key", "the disk is full")).start()
        started = time.monotonic()
        try:
            reader.get(Handle(self.backend_name, "key"), 30)
        except CaptureFailed as error:
            assert "the disk is full" in str(error)
        else:
            raise AssertionError("an error marker was read as a record")
        assert time.monotonic() - started < 5

    def test_a_reader_gives_up(self, tmp_path: Path) -> None:
        """After its own timeout, saying so."""
        _, reader = self.open(tmp_path)
        for timeout_s in (0, 0.1):
            _expect(RecordTimeout, reader, timeout_s)

    def test_a_record_is_its_stores_own(self, tmp_path: Path) -> None:
        """What its writer does with the memory afterwards is nothing to it."""
        writer, reader = self.open(tmp_path)
        for tokens in (50, 40, 30):
            record = make_record(tokens, seed=tokens)
            writer.put(f"key-{tokens}", record)
            record.hidden_states.zero_()
            record.token_ids.zero_()
        for tokens in (50, 40, 30):
            assert_same(reader.get(Handle(self.backend_name, f"key-{tokens}"), 5), make_record(tokens, seed=tokens))

    def test_pieces_arrive_as_one(self, tmp_path: Path) -> None:
        """Whatever kind of memory they lie in, and however small they are."""
        config = self.make_config(tmp_path)
        backend = open_backend(self.backend_name, config)
        backend.prepare()
        large = memoryview(bytearray(b"b" * 70_000))
        pieces: list[Payload] = [b"a" * 100, large, b"", bytearray(b"c"), memoryview(b"d" * 9)]
        backend.publish("key", *pieces)
        assert bytes(backend.fetch("key", 5)) == b"".join(pieces)

    def test_a_refused_record_is_not_visible(self, tmp_path: Path) -> None:
        """NaN and infinity never reach a reader."""
        writer, reader = self.open(tmp_path)
        for value in (float("nan"), float("inf"), float("-inf")):
            record = make_record()
            record.hidden_states[3, 1, 2] = value
            try:
                writer.put("key", record)
            except RecordNotFinite as error:
                assert "[4]" in str(error) and "position 3" in str(error)
            else:
                raise AssertionError(f"{value} was published")
        _expect(RecordTimeout, reader, 0)

    def test_a_flipped_bit_is_seen(self, tmp_path: Path) -> None:
        """Wherever it is in the payload: header, ids or states."""
        config = self.make_config(tmp_path)
        backend, reader = open_backend(self.backend_name, config), open_reader(self.backend_name, config)
        backend.prepare()
        payload = bytes(pack(make_record()))
        for at in (payload.index(b"test"), len(payload) - 1, len(payload) - 60):
            torn = bytearray(payload)
            torn[at] ^= 1
            backend.publish("key", torn)
            _expect(RecordCorrupt, reader, 1)

    def test_a_payload_cut_short_is_seen(self, tmp_path: Path) -> None:
        """Wherever it was cut."""
        config = self.make_config(tmp_path)
        backend, reader = open_backend(self.backend_name, config), open_reader(self.backend_name, config)
        backend.prepare()
        payload = bytes(pack(make_record()))
        for length in (0, 7, 40, len(payload) - 1):
            backend.publish("key", payload[:length])
            _expect(RecordError, reader, 1)

    def test_every_codec_composes(self, tmp_path: Path) -> None:
        """What a codec keeps, the store keeps; readers need not be told which it is."""
        config = self.make_config(tmp_path)
        reader = open_reader(self.backend_name, config)
        for codec in CODECS:
            record = unpack(pack(make_record(), codec))
            handle = open_writer(self.backend_name, config, codec).put(codec, record)
            assert_same(reader.get(handle, 1), record)

    def test_a_record_outlives_its_deletion(self, tmp_path: Path) -> None:
        """A reader may delete what it has, and write into it: nobody else sees that."""
        writer, reader = self.open(tmp_path)
        handle = writer.put("key", make_record(3000))
        first, second = reader.get(handle, 1), reader.get(handle, 1)
        first.hidden_states.zero_()
        reader.delete(handle)
        assert_same(second, make_record(3000))

    def test_entries_are_what_is_visible(self, tmp_path: Path) -> None:
        """Keys, kinds, sizes and times; nothing of what was deleted, and the announcement is none of them."""
        config = self.make_config(tmp_path)
        backend = open_backend(self.backend_name, config)
        assert list(backend.entries()) == []
        backend.prepare()
        started = time.time()
        backend.announce({"vllm": "1"})
        for key, length in (("one", 10), ("two", 2000), ("gone", 5)):
            backend.publish(key, b"x" * length)
        backend.fail("failed", "why")
        backend.discard("gone")
        found = {entry.key: entry for entry in backend.entries()}
        assert {key: (entry.kind, entry.num_bytes) for key, entry in found.items()} == {
            "one": ("record", 10),
            "two": ("record", 2000),
            "failed": ("error", 0),
        }
        assert all(abs(entry.modified_at - started) < 30 for entry in found.values())

    def test_delete_is_idempotent(self, tmp_path: Path) -> None:
        """Records, error markers and nothing at all can be deleted, repeatedly."""
        writer, reader = self.open(tmp_path)
        handle = writer.put("key", make_record())
        writer.fail("key", "and failed, too")
        for _ in range(3):
            reader.delete(handle)
        _expect(RecordTimeout, reader, 0)

    def test_what_others_keep_there_stays_and_stops_nothing(self, tmp_path: Path) -> None:
        """Care of the store names what is not its own, goes on, and deletes its own only."""
        backend = open_backend(self.backend_name, self.make_config(tmp_path))
        backend.prepare()
        backend.publish("zz-ours", pack(make_record()))
        backend.fail("zz-failed", "why")
        look = self.lay_foreign(tmp_path)
        before = look()
        backend.prepare()
        assert [found.entry.key for found in check(backend) if found.problem is None] == ["zz-ours"]
        expired = [found.entry.key for found in collect(backend, -60, apply=True) if found.problem is None]
        assert sorted(expired) == ["zz-failed", "zz-ours"]
        for entry in backend.entries():
            try:
                backend.discard(entry.key)
            except StorageError:
                continue
            raise AssertionError(f"{entry.key} is not its own, and was deleted")
        assert look() == before

    def test_a_store_of_another_engine_takes_no_copy(self, tmp_path: Path) -> None:
        """Of one that captures the same it does, and the announcement there stays."""
        store = open_backend(self.backend_name, self.make_config(tmp_path))
        store.prepare()
        announced = {"verifier_fingerprint": "a", "layer_ids": [1, 4, 8], "codec": "none", "pid": 1}
        store.announce(announced)
        source = open_backend("memory", {"space": f"source of {tmp_path}"})
        source.publish("key", pack(make_record()))
        for facts in ({"verifier_fingerprint": "b"}, {"layer_ids": [1, 4]}, {"codec": "fp8"}):
            source.announce(announced | facts)
            try:
                list(copy(source, store))
            except SettingsError as error:
                assert all(str(side) in error.what for name in facts for side in (facts[name], announced[name]))
            else:
                raise AssertionError(f"{facts} were copied into the store of {announced}")
        assert list(store.entries()) == []
        source.announce(announced | {"pid": 2})
        assert [done.records for done in copy(source, store)] == [1]
        assert store.announcement() == announced

    def test_hostile_keys_are_refused(self, tmp_path: Path) -> None:
        """By the handle, and by every method that takes a bare key."""
        config = self.make_config(tmp_path)
        backend = open_backend(self.backend_name, config)
        backend.prepare()
        for key in HOSTILE_KEYS:
            calls = (
                lambda k=key: Handle(self.backend_name, k),
                lambda k=key: backend.publish(k, b"x"),
                lambda k=key: backend.fail(k, "x"),
                lambda k=key: backend.fetch(k, 0),
                lambda k=key: backend.discard(k),
            )
            for call in calls:
                try:
                    call()
                except SettingsError:
                    continue
                raise AssertionError(f"key {key!r} was accepted")

    def test_readers_never_see_half_a_record(self, tmp_path: Path) -> None:
        """Many writers of the same keys, many readers: whatever is read is whole."""
        config = self.make_config(tmp_path)
        writer = open_writer(self.backend_name, config)
        records = [make_record(400, seed) for seed in range(8)]

        def write(seed: int) -> None:
            for key in ("a", "b", "c"):
                writer.put(key, records[seed])

        def read(key: str) -> None:
            reader = open_reader(self.backend_name, config)
            for _ in range(10):
                got = reader.get(Handle(self.backend_name, key), 10)
                assert_same(got, records[int(got.extra["seed"])])

        with ThreadPoolExecutor(14) as pool:
            done = [pool.submit(write, seed) for seed in range(8)] + [pool.submit(read, key) for key in "abcabc"]
            for future in done:
                future.result()

    def test_the_engine_announces_itself(self, tmp_path: Path) -> None:
        """None before, the last facts after."""
        writer, reader = self.open(tmp_path)
        assert reader.announcement() is None
        writer.announce({"vllm": "0", "layer_ids": [1]})
        writer.announce({"vllm": "1", "layer_ids": [1, 2]})
        assert reader.announcement() == {"vllm": "1", "layer_ids": [1, 2]}

    def test_a_foreign_handle_is_refused(self, tmp_path: Path) -> None:
        """A reader of one backend does not look for another's key."""
        _, reader = self.open(tmp_path)
        try:
            reader.get(Handle("another", "key"), 0)
        except SettingsError:
            return
        raise AssertionError("a foreign handle was accepted")


def _expect(kind: type[Exception], reader: Reader, timeout_s: float) -> None:
    try:
        reader.get(Handle(_name(reader), "key"), timeout_s)
    except kind:
        return
    raise AssertionError(f"expected {kind.__name__}")


def _name(reader: Reader) -> str:
    backend = getattr(reader, "_backend", None)
    assert backend is not None, "the suite reads through hs_connectors' own reader"
    return str(backend.name)
