"""File-system habits of the store."""

from __future__ import annotations

from pathlib import Path

import pytest

from speculators_core.errors import StoreError
from speculators_core.store.files import write_atomic


def test_a_place_that_cannot_be_written_is_an_error_of_ours_and_not_that_of_the_clean_up(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot go on while writing"):
        write_atomic(tmp_path / "file" / "inner", lambda part: part.write_text("x"))
