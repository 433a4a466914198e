from __future__ import annotations

import gc
import json
import subprocess
import sys
import zlib
from dataclasses import replace

import pytest
import safetensors.torch
import torch

from hs_connectors import Record
from hs_connectors.errors import RecordCorrupt, RecordError, RecordNotFinite, SettingsError, UnknownName
from hs_connectors.record import SCHEMA, pack, pieces, unpack
from hs_connectors.testing import assert_same, make_record
from tests.environment import child_environment


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_what_was_packed_is_unpacked(dtype: str) -> None:
    record = replace(make_record(), dtype=dtype, hidden_states=make_record().hidden_states.to(getattr(torch, dtype)))
    assert_same(unpack(pack(record)), record)


def test_any_safetensors_library_reads_a_record() -> None:
    record = make_record()
    tensors = safetensors.torch.load(bytes(pack(record)))
    assert set(tensors) == {"hidden_states", "token_ids"}
    assert torch.equal(tensors["hidden_states"], record.hidden_states)


def seal(payload: bytes) -> bytearray:
    """The payload with the right checksum where it has one of eight zeros."""
    sealed = bytearray(payload)
    at = sealed.index(b'"crc32":"') + 9
    sealed[at : at + 8] = b"%08x" % zlib.crc32(sealed)
    return sealed


def metadata_of(record: Record) -> dict[str, str]:
    payload = bytearray(pack(record))
    header = json.loads(payload[8 : 8 + int.from_bytes(payload[:8], "little")])
    return {**header["__metadata__"], "crc32": "00000000"}


def test_a_record_that_another_safetensors_library_wrote_is_read() -> None:
    record = make_record()
    tensors = {"hidden_states": record.hidden_states, "token_ids": record.token_ids}
    assert_same(unpack(seal(safetensors.torch.save(tensors, metadata_of(record)))), record)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "BF16", "shape": [7, 3, 5], "data_offsets": [0, 1 << 40]},
        {"dtype": "BF16", "shape": [1 << 70, 3, 5], "data_offsets": [0, (1 << 70) * 30]},
        {"dtype": "BF16", "shape": [-7, -3, 5], "data_offsets": [0, 210]},
        {"dtype": "BF16", "shape": [7, 3, 5], "data_offsets": [-210, 0]},
        {"dtype": "BF16", "shape": [7, 3, 5], "data_offsets": [1000, 1210]},
        {"dtype": "BF16", "shape": "735", "data_offsets": [0, 210]},
        {"dtype": "C64", "shape": [7, 3, 5], "data_offsets": [0, 840]},
        {"shape": [7, 3, 5]},
        [],
        None,
    ],
)
def test_a_hostile_header_with_a_right_checksum_is_no_record(entry: object) -> None:
    header = {"__metadata__": metadata_of(make_record()), "hidden_states": entry}
    header["token_ids"] = {"dtype": "I64", "shape": [7], "data_offsets": [0, 56]}
    text = json.dumps(header, separators=(",", ":")).encode()
    with pytest.raises(RecordError):
        unpack(seal(len(text).to_bytes(8, "little") + text + bytes(300)))


def test_the_header_says_what_the_specification_says() -> None:
    payload = bytearray(pack(make_record()))
    header = json.loads(payload[8 : 8 + int.from_bytes(payload[:8], "little")])
    metadata = header["__metadata__"]
    assert set(metadata) == {
        "schema", "layer_ids", "dtype", "verifier_fingerprint", "codec", "extra", "crc32",
    }  # fmt: skip
    assert metadata["schema"] == SCHEMA and json.loads(metadata["layer_ids"]) == [1, 4, 8]


def test_packing_a_view_stores_the_view() -> None:
    record = make_record(32)
    view = replace(record, hidden_states=record.hidden_states[3:9], token_ids=record.token_ids[3:9])
    assert len(pack(view)) < len(pack(record))
    assert_same(unpack(pack(view)), view)


def test_tensors_are_not_copied_on_their_way_into_a_payload() -> None:
    record = make_record()
    where = {tensor.data_ptr() for tensor in (record.hidden_states, record.token_ids)}
    _, *rest = pieces(record)
    assert {torch.frombuffer(piece, dtype=torch.uint8).data_ptr() for piece in rest} == where
    kept = pieces(make_record())  # whose tensors nobody else holds
    gc.collect()
    assert b"".join(kept) == pack(record)


def test_every_byte_is_covered_by_the_checksum() -> None:
    payload = bytearray(pack(make_record(2)))
    for at in range(len(payload)):
        torn = bytearray(payload)
        torn[at] ^= 0x10
        with pytest.raises(RecordError):
            unpack(torn)


def test_text_that_imitates_the_checksum_field_is_only_text() -> None:
    record = replace(make_record(), verifier_fingerprint='","crc32":"00000000"', extra={'"crc32":"': '"crc32":"'})
    assert_same(unpack(pack(record)), record)


@pytest.mark.parametrize("cut", [0, 7, 8, 100, -1])
def test_a_torn_payload_is_no_record(cut: int) -> None:
    with pytest.raises(RecordError):
        unpack(pack(make_record())[:cut])


def test_an_unknown_schema_is_told_apart_from_damage() -> None:
    payload = bytes(pack(make_record())).replace(SCHEMA.encode(), SCHEMA.encode()[:-1] + b"9")
    with pytest.raises(RecordError, match="hidden-states/9") as caught:
        unpack(payload)
    assert not isinstance(caught.value, RecordCorrupt)


def test_shapes_that_disagree_are_refused() -> None:
    record = make_record()
    for wrong in (
        replace(record, layer_ids=(1, 4)),
        replace(record, token_ids=record.token_ids[:-1]),
        replace(record, token_ids=record.token_ids.int()),
        replace(record, dtype="float32"),
        replace(record, dtype="no_such_dtype"),
        replace(record, hidden_states=record.hidden_states.flatten(1)),
    ):
        with pytest.raises(SettingsError):
            pack(wrong)


def test_states_that_are_not_finite_are_located() -> None:
    record = make_record()
    record.hidden_states[2:4, 2, 0] = float("nan")
    with pytest.raises(RecordNotFinite, match=r"layers \[8\] .* 2 of 7 tokens, the first at position 2"):
        pack(record)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [1, 5, 576, 2048])
def test_one_state_that_is_not_finite_is_found_wherever_it_is(width: int, dtype: torch.dtype) -> None:
    """Products and sums of any width go through kernels of their own, and each has a tail."""
    name = str(dtype).removeprefix("torch.")
    record = replace(make_record(33), dtype=name, hidden_states=torch.randn(33, 3, width).to(dtype))
    pieces(record)
    for at in {0, width // 2, width - 1}:
        for value in (float("nan"), float("inf"), float("-inf")):
            states = record.hidden_states.clone()
            states[32, 2, at] = value
            with pytest.raises(RecordNotFinite, match="position 32"):
                pieces(replace(record, hidden_states=states))


def test_huge_states_whose_sum_overflows_are_finite_all_the_same() -> None:
    record = replace(make_record(), hidden_states=torch.full((7, 3, 5), 3e38, dtype=torch.bfloat16))
    assert_same(unpack(pack(record)), record)


def test_infinities_that_cancel_are_seen() -> None:
    record = make_record()
    record.hidden_states[0, 0, 0], record.hidden_states[0, 0, 1] = float("inf"), -float("inf")
    with pytest.raises(RecordNotFinite, match="1 of 7 tokens"):
        pack(record)


def test_an_unknown_codec_lists_the_known() -> None:
    with pytest.raises(UnknownName, match="none"):
        pack(make_record(), "zip")


def test_a_forked_process_packs_records_of_any_size_after_torch_has_had_its_threads() -> None:
    code = (
        "import os, signal, torch\n"
        "from hs_connectors.record import pack\n"
        "from hs_connectors.testing import make_record\n"
        "torch.set_num_threads(2)\n"
        "records = make_record(400), make_record(40_000)\n"
        "torch.ones(512, 512, dtype=torch.bfloat16) @ torch.ones(512, 512, dtype=torch.bfloat16)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    signal.alarm(20)\n"
        "    [pack(record) for record in records]; os._exit(0)\n"
        "raise SystemExit(os.waitpid(child, 0)[1])\n"
    )
    assert subprocess.run([sys.executable, "-c", code], env=child_environment(), check=False).returncode == 0
