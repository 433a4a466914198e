"""The byte layout of a record: one safetensors payload that any safetensors library reads.

Tensors: `hidden_states` (as its codec stores it) and `token_ids` int64 [T].
Metadata (text): schema, layer_ids (JSON), dtype, verifier_fingerprint, codec, extra (JSON), crc32.
The checksum covers the whole payload, header included, with its own eight digits as zeros.
The README beside the source states this as a specification.

Written and read here without the library, since these bytes are what the engine waits for: a record's tensors are not
copied on their way into a payload, nor on their way out.
"""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hs_connectors.checksums import crc32_of
from hs_connectors.codecs import find_codec
from hs_connectors.contract import Payload, Record
from hs_connectors.errors import RecordCorrupt, RecordError, RecordNotFinite, SettingsError

SCHEMA = "draftsmith.hidden-states/1"
_CRC_FIELD = b'"crc32":"'
_NO_CRC = b"00000000"
_DTYPES = {
    "I64": torch.int64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
}
"""safetensors' names of what codecs store, widest first: the order in a payload, so that each tensor is aligned."""
_ALIGNMENT = 8
_ALONE = 2**15 - 1
"""Most elements that torch sums in the calling thread: an engine's own threads are not to be disturbed by others."""


def pack(record: Record, codec: str = "none") -> bytearray:
    """The record as bytes in one piece; errors as in `pieces`."""
    return bytearray().join(pieces(record, codec))


def pieces(record: Record, codec: str = "none") -> tuple[Payload, ...]:
    """The record as bytes: what precedes the tensors, then each tensor's own memory. Nothing may change it meanwhile.

    Raises SettingsError where shapes, dtype and layer ids disagree, RecordNotFinite where a state is NaN or
    infinite, UnknownName for the codec.
    """
    _check(record)
    tensors = find_codec(codec).encode(record.hidden_states)
    tensors["token_ids"] = record.token_ids.contiguous()
    metadata = {
        "schema": SCHEMA,
        "layer_ids": json.dumps(record.layer_ids),
        "dtype": record.dtype,
        "verifier_fingerprint": record.verifier_fingerprint,
        "codec": codec,
        "extra": json.dumps(dict(record.extra)),
        "crc32": _NO_CRC.decode(),
    }
    preamble, *rest = _serialise(tensors, metadata)
    at = _crc_position(preamble)
    preamble[at : at + 8] = b"%08x" % crc32_of((preamble, *rest))
    return preamble, *rest


def unpack(payload: Payload) -> Record:
    """The record in such bytes; its tensors share their memory where that is writable.

    Raises RecordError where they are no record of this schema, RecordCorrupt where the checksum differs.
    """
    header = _header(payload)
    metadata = header.pop("__metadata__")
    if metadata.get("schema") != SCHEMA:
        raise RecordError(
            f"record schema {metadata.get('schema')!r}, this reader knows {SCHEMA!r}",
            mend="install the same draftsmith-hs-connectors on both sides",
        )
    _verify(payload)
    try:
        tensors = _tensors(payload, header)
        dtype = getattr(torch, metadata["dtype"])
        record = Record(
            hidden_states=find_codec(metadata["codec"]).decode(tensors, dtype),
            token_ids=tensors["token_ids"],
            layer_ids=tuple(json.loads(metadata["layer_ids"])),
            dtype=metadata["dtype"],
            verifier_fingerprint=metadata["verifier_fingerprint"],
            extra=json.loads(metadata["extra"]),
        )
        _check_shapes(record)
    except (LookupError, AttributeError, ValueError, TypeError, ArithmeticError, RuntimeError, SettingsError) as error:
        raise RecordError(f"a record with a right checksum and wrong content: {error}") from error
    return record


def _check(record: Record) -> None:
    _check_shapes(record)
    # A finite sum proves finite terms in one pass without a temporary; the exact test is for the rest.
    if not math.isfinite(_sum(record.hidden_states)):
        _refuse_not_finite(record)


def _sum(states_TKH: torch.Tensor) -> float:
    """Of all elements, piece by piece: NaN and infinity stay in it, and no thread of torch's is woken.

    Beside an engine those would take its processors; and a process that was forked behind them waits for them for ever.
    """
    return sum(piece.sum().item() for piece in torch.split(states_TKH.reshape(-1), _ALONE))


def _refuse_not_finite(record: Record) -> None:
    if not bool(torch.isfinite(record.hidden_states).all()):
        bad_TK = ~torch.isfinite(record.hidden_states).all(dim=-1)
        tokens = bad_TK.any(dim=1).nonzero().flatten().tolist()
        layers = [record.layer_ids[k] for k in bad_TK.any(dim=0).nonzero().flatten().tolist()]
        raise RecordNotFinite(
            f"hidden states of layers {layers} are not finite at {len(tokens)} of {len(bad_TK)} tokens, "
            f"the first at position {tokens[0]}",
            mend="a verifier that overflows in this dtype usually runs in bfloat16 or float32",
        )


def _check_shapes(record: Record) -> None:
    states, ids = record.hidden_states, record.token_ids
    if states.dim() != 3 or states.shape[1] != len(record.layer_ids) or ids.shape != states.shape[:1]:
        raise SettingsError(
            f"hidden states {list(states.shape)} do not fit {ids.numel()} tokens and layers {list(record.layer_ids)}"
        )
    if ids.dtype != torch.int64 or states.dtype != getattr(torch, record.dtype, None):
        raise SettingsError(f"a {record.dtype} record of int64 tokens, got {states.dtype} and {ids.dtype}")


def _serialise(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> Iterator[Any]:
    """The safetensors payload of these tensors: length of the header and header, then each tensor without gaps."""
    names = {dtype: name for name, dtype in _DTYPES.items()}
    order = list(names)
    placed = sorted(tensors.items(), key=lambda item: (order.index(item[1].dtype), item[0]))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in placed:
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    yield bytearray(len(text).to_bytes(8, "little") + text)
    yield from (_memory(tensor) for _, tensor in placed if tensor.nbytes)


def _memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor where they lie; the view keeps the tensor."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu", "codecs promise it"
    array = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    array.tensor = tensor  # type: ignore[attr-defined]  # a reference, for as long as the view lives
    return memoryview(array).cast("B")


def _tensors(payload: Payload, header: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors that a header names, as views of the payload (of a copy, where it is read-only)."""
    view = memoryview(payload)
    buffer = bytearray(view) if view.readonly else view
    first = 8 + int.from_bytes(view[:8], "little")
    tensors = {}
    for name, entry in header.items():
        dtype, shape, (begin, end) = _DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        if min([begin, *shape]) < 0 or math.prod(shape) * dtype.itemsize != end - begin:
            raise ValueError(f"tensor {name} of shape {shape} in {end - begin} bytes")
        tensors[name] = (
            torch.frombuffer(buffer, dtype=dtype, count=math.prod(shape), offset=first + begin).view(shape)
            if end > begin
            else torch.empty(shape, dtype=dtype)
        )
    return tensors


def _header(payload: Payload) -> dict[str, Any]:
    view = memoryview(payload)
    length = int.from_bytes(view[:8], "little")
    try:
        header: dict[str, Any] = dict(json.loads(bytes(view[8 : 8 + length])))
        header["__metadata__"] = dict(header["__metadata__"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RecordError(f"{len(view)} bytes that are not a record: {error}") from error
    return header


def _verify(payload: Payload) -> None:
    view, at = memoryview(payload), _crc_position(payload)
    found = crc32_of((view[:at], _NO_CRC, view[at + 8 :]))
    if bytes(view[at : at + 8]) != b"%08x" % found:
        raise RecordCorrupt(
            f"record checksum {found:08x} differs from {bytes(view[at : at + 8])!r} in its header",
            mend="the bytes changed after they were written: delete the record and capture the row again",
        )


def _crc_position(payload: Payload) -> int:
    """Offset of the checksum's digits. Quotes inside values are escaped, so the field cannot be imitated."""
    view = memoryview(payload)
    end = 8 + int.from_bytes(view[:8], "little")
    at = bytes(view[:end]).find(_CRC_FIELD)
    if at < 0:
        raise RecordError("record without a checksum")
    return at + len(_CRC_FIELD)
