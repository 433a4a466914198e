"""How a training process tells its end; that it does so at all is proved in tests/integration/test_training.py."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from speculators_core.training.request import OUTCOME, Outcome
from speculators_core.training_process import _leave


def test_an_end_that_cannot_be_written_is_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / OUTCOME).mkdir()
    with caplog.at_level(logging.ERROR):
        _leave(tmp_path, Outcome(outcome="failed", error="StoreError", what="the disk is full"))
    assert "the disk is full" in caplog.text and '"outcome":"failed"' in caplog.text
