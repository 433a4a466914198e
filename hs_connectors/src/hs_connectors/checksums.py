"""The checksum of a payload, in one piece or in several."""

from __future__ import annotations

from collections.abc import Iterable

from hs_connectors.contract import Payload

try:
    from zlib_ng.zlib_ng import crc32  # the same CRC-32, several times faster than the standard library's
except ImportError:
    from zlib import crc32


def crc32_of(pieces: Iterable[Payload]) -> int:
    """CRC-32 of these pieces, one behind the other."""
    value = 0
    for piece in pieces:
        value = crc32(piece, value)
    return value
