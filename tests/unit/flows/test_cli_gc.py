from __future__ import annotations

import pytest

from flows.cli_gc import as_bytes, as_text
from speculators_core.errors import ConfigError


def test_sizes_are_read_and_written():
    assert [as_bytes(text) for text in ("1024", "500MB", "1.5TiB", "2 gib", "0")] == [
        1024,
        500_000_000,
        3 * 2**39,
        2**31,
        0,
    ]
    assert [as_text(size) for size in (0, 1023, 2**20, 3 * 2**39, 2**60)] == [
        "0 B",
        "1023 B",
        "1.0 MiB",
        "1.5 TiB",
        "1048576.0 TiB",
    ]
    for text in ("", "much", "12 parsecs", "GB"):
        with pytest.raises(ConfigError, match="is no size"):
            as_bytes(text)


@pytest.mark.parametrize("text", ["-5GB", "inf", "nan", "1e400TB", "", "x"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match="is no size"):
        as_bytes(text)
