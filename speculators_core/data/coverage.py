"""How much of what a verifier says a draft vocabulary of some size can say: a table of sizes, and a suggestion.

Tokens are chosen by how often they are supervised in the training rows. Of a small data set that flatters: its own rare
tokens are all in it. So the suggestion goes by the validation rows, which chose nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from speculators_core.data.rows import SPLITS, RowSet
from speculators_core.data.vocabulary import DraftVocabulary, select_draft_vocabulary
from speculators_core.types import StrictModel

if TYPE_CHECKING:
    from torch import Tensor

ENOUGH = 0.995
"""Share of the tokens of unseen replies at which a vocabulary costs next to nothing: one draft in 200 ends early."""
FEW_TOKENS = 2000
"""Fewer validation tokens than this tell little about rare tokens."""


class Coverage(StrictModel):
    """What a draft vocabulary of one size covers."""

    size: int = Field(description="tokens that the draft can propose")
    train: float = Field(description="share of the supervised tokens of the training rows")
    unseen: float | None = Field(description="the same of the validation rows; null: there are none")
    by_domain: dict[str, float] = Field(description="share of all supervised tokens, by domain of the conversation")


class VocabularyTable(StrictModel):
    """Sizes with their coverage, ascending, and the smallest that is enough."""

    verifier_size: int = Field(description="tokens that the verifier knows")
    tokens: dict[str, int] = Field(description="supervised tokens, by split")
    distinct: int = Field(description="distinct tokens among those of the training rows")
    sizes: tuple[Coverage, ...] = Field(description="the last one is the whole vocabulary")
    enough: float = Field(description="share that the suggestion goes by")
    suggested: int = Field(description="smallest size that covers it; the whole vocabulary where none does")
    given: Coverage | None = Field(None, description="of the vocabulary that the recipe names")

    @property
    def caution(self) -> str | None:
        """Why the suggestion may not be trusted."""
        few = self.tokens["validation"]
        if few >= FEW_TOKENS:
            return None
        return f"only {few} tokens of validation rows stand behind the suggestion: prepare more conversations"


def tabulate(
    rows: RowSet, verifier_size: int, sizes: Sequence[int] = (), *, enough: float = ENOUGH,
    given: DraftVocabulary | None = None,
) -> VocabularyTable:  # fmt: skip
    """Coverage of each size (by default the powers of two from 1,024) and the suggestion.

    Args:
        given: a vocabulary that the recipe names, to be reported beside the sizes.
    """
    counts = {split: rows.token_counts(verifier_size, split) for split in SPLITS}
    domains = _by_domain(rows, verifier_size)
    powers = [2**power for power in range(10, verifier_size.bit_length())]
    chosen = sorted({size for size in sizes or powers if 0 < size < verifier_size} | {verifier_size})

    def covered(vocabulary: DraftVocabulary) -> Coverage:
        unseen = vocabulary.coverage(counts["validation"]) if int(counts["validation"].sum()) else None
        return Coverage(
            size=vocabulary.size,
            train=vocabulary.coverage(counts["train"]),
            unseen=unseen,
            by_domain={name: vocabulary.coverage(count) for name, count in domains.items()},
        )

    found = tuple(covered(select_draft_vocabulary(counts["train"], size, verifier_size)) for size in chosen)
    known = [row for row in found if (row.train if row.unseen is None else row.unseen) >= enough]
    return VocabularyTable(
        verifier_size=verifier_size,
        tokens={split: int(count.sum()) for split, count in counts.items()},
        distinct=int((counts["train"] > 0).sum()),
        sizes=found,
        enough=enough,
        suggested=known[0].size if known else verifier_size,
        given=None if given is None else covered(given),
    )


def plot(table: VocabularyTable, path: Path) -> None:
    """Coverage over size as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    FigureCanvasAgg(figure)  # no pyplot: it keeps global state
    axes = figure.add_subplot()
    sizes = [row.size for row in table.sizes]
    axes.plot(sizes, [row.train for row in table.sizes], marker="o", label="training rows")
    if all(row.unseen is not None for row in table.sizes):
        axes.plot(sizes, [row.unseen or 0.0 for row in table.sizes], marker="o", label="validation rows")
    axes.axhline(table.enough, linestyle=":", color="grey")
    axes.axvline(table.suggested, linestyle=":", color="grey", label=f"suggested: {table.suggested:,}")
    axes.set(xscale="log", xlabel="draft vocabulary", ylabel="share of supervised tokens", title="What a draft can say")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend()
    figure.savefig(path, dpi=120)


def _by_domain(rows: RowSet, verifier_size: int) -> dict[str, Tensor]:
    """Domain -> int64 [V], how often each id is supervised in its rows."""
    import torch

    found: dict[str, Tensor] = {}
    for index in range(rows.num_rows):
        row = rows.row(index)
        counted = torch.bincount(row.input_ids[row.loss_mask], minlength=verifier_size)
        found[row.domain] = found[row.domain] + counted if row.domain in found else counted
    return dict(sorted(found.items()))
