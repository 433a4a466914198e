"""The sample shows, in colour or with marks, exactly what is supervised."""

from __future__ import annotations

import re
from io import StringIO
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
    shown = render_row(RowSet.open(tmp_path).row(0), ChatTemplate.load(verifier), coloured=True)
    coloured = [segment.text for segment in console.render(shown) if segment.style and str(segment.style) == SUPERVISED]
    text = "".join(coloured).replace("\n", "")
    assert "Yes, it rains in Bergen at nine degrees." in text and "umbrella" not in text
    assert "⟦" not in "".join(segment.text for segment in console.render(shown))


def test_without_colours_supervised_text_is_marked(verifier: Path, tmp_path: Path) -> None:
    source = str(CONVERSATIONS / "multi_turn.jsonl")
    prepare(DataConfig(sources=(source,), evaluation_prompts=0, validation_share=0), verifier, tmp_path)
    row, template = RowSet.open(tmp_path).row(0), ChatTemplate.load(verifier)
    console = Console(width=10_000, file=StringIO())
    console.print(render_row(row, template, coloured=False))
    _, legend, *body = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert legend.endswith("context ⟦written by the verifier⟧")
    marked = re.findall("⟦(.*?)⟧", "\n".join(body), re.DOTALL)
    ids, mask = row.input_ids.tolist(), row.loss_mask.tolist()
    assert marked == [template.decode(span) for supervised, span in spans(ids, mask) if supervised] and marked
