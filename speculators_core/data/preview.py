"""One prepared row, in colour or with marks: what the draft learns from stands out from what it only reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from speculators_core.data.rows import Row
from speculators_core.data.template import ChatTemplate

if TYPE_CHECKING:
    from rich.console import Group

SUPERVISED, CONTEXT = "bold black on green3", "grey58"
MARKS = "⟦", "⟧"


def render_row(row: Row, template: ChatTemplate, *, coloured: bool) -> Group:
    """A rich renderable of a row: supervised tokens on green, context in grey, with a legend.

    Without colours, as in a pipe, supervised tokens stand between `MARKS`.
    """
    from rich.console import Group
    from rich.text import Text

    before, after = ("", "") if coloured else MARKS
    ids, mask = row.input_ids.tolist(), row.loss_mask.tolist()
    body = Text()
    for supervised, span in spans(ids, mask):
        text = template.decode(span)
        if supervised:
            body.append(f"{before}{text}{after}", SUPERVISED)
        else:
            body.append(text, CONTEXT)
    head = Text.assemble(
        (f"row {row.index} · {row.id} · {row.domain} · {row.split}", "bold"),
        f"\n{len(ids)} tokens, {sum(mask)} supervised: ",
        ("context", CONTEXT),
        " ",
        (f"{before}written by the verifier{after}", SUPERVISED),
        "\n",
    )
    return Group(head, body)


def spans(ids: Sequence[int], mask: Sequence[bool]) -> list[tuple[bool, list[int]]]:
    """Runs of equal mask: (supervised, ids)."""
    runs: list[tuple[bool, list[int]]] = []
    for token, supervised in zip(ids, mask, strict=True):
        if not runs or runs[-1][0] != bool(supervised):
            runs.append((bool(supervised), []))
        runs[-1][1].append(token)
    return runs
