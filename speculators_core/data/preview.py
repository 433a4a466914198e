"""One prepared row in colour: what the draft learns from stands out from what it only reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from speculators_core.data.rows import Row
from speculators_core.data.template import ChatTemplate

if TYPE_CHECKING:
    from rich.console import Group

SUPERVISED, CONTEXT = "bold black on green3", "grey58"


def render_row(row: Row, template: ChatTemplate) -> Group:
    """A rich renderable of a row: supervised tokens on green, context in grey, with a legend."""
    from rich.console import Group
    from rich.text import Text

    ids, mask = row.input_ids.tolist(), row.loss_mask.tolist()
    body = Text()
    for supervised, span in spans(ids, mask):
        body.append(template.decode(span), style=SUPERVISED if supervised else CONTEXT)
    head = Text.assemble(
        (f"row {row.index} · {row.id} · {row.domain} · {row.split}", "bold"),
        f"\n{len(ids)} tokens, {sum(mask)} supervised: ",
        ("context", CONTEXT),
        " ",
        ("written by the verifier", SUPERVISED),
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
