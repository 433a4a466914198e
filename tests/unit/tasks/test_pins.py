"""The list of what shall be kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from speculators_core.errors import StoreError
from tasks.retention import read_pins


@pytest.mark.parametrize("content", ['{"a', "", "5", '[{"name": "x"}]'])
def test_a_list_that_cannot_be_read_is_not_an_empty_one(tmp_path: Path, content: str) -> None:
    assert read_pins(tmp_path) == ()
    (tmp_path / "pins.json").write_text(content)
    with pytest.raises(StoreError, match=r"pins\.json cannot be read"):
        read_pins(tmp_path)
