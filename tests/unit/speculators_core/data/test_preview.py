"""The coloured sample shows exactly what is supervised."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from speculators_core.data.config import DataConfig
from speculators_core.data.prepare import prepare
from speculators_core.data.preview import SUPERVISED, render_row, spans
from speculators_core.data.rows import RowSet
from speculators_core.data.template import ChatTemplate

from .conftest import CONVERSATIONS


def test_spans() -> None:
    assert spans([1, 2, 3, 4, 5], [False, True, True, False, True]) == [
        (False, [1]), (True, [2, 3]), (False, [4]), (True, [5])
    ]  # fmt: skip
    assert spans([], []) == []


def test_supervised_text_has_its_colour(verifier: Path, tmp_path: Path) -> None:
    source = str(CONVERSATIONS / "tools.jsonl")
    prepare(DataConfig(sources=(source,), evaluation_prompts=0, validation_share=0), verifier, tmp_path)
    console = Console(record=True, width=100, color_system="truecolor", file=(tmp_path / "out").open("w"))
    shown = render_row(RowSet.open(tmp_path).row(0), ChatTemplate.load(verifier))
    coloured = [segment.text for segment in console.render(shown) if segment.style and str(segment.style) == SUPERVISED]
    text = "".join(coloured).replace("\n", "")
    assert "Yes, it rains in Bergen at nine degrees." in text and "umbrella" not in text
