"""Splits that do not leak: conversations are assigned by their first user turn, near-duplicates together.

Overlap of two texts is Dice's coefficient of their sets of word pairs, 2·|A ∩ B| / (|A| + |B|), on text folded to
words; above 0.7 they are near-duplicates. (A Jaccard index above 0.7 implies it.) All pairs above the threshold are
found exactly, by the prefix filter: sets that overlap enough share one of their rarest elements (Bayardo, Ma and
Srikant, "Scaling up all pairs similarity search", WWW 2007).
"""

from __future__ import annotations

import hashlib
import math
import re
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING

from speculators_core.types import Split

if TYPE_CHECKING:  # commands that only look at a plan start without numpy
    import numpy as np
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

OVERLAP = 0.7
_CJK = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"  # scripts without blanks: each character is a word
_WORD = re.compile(rf"[{_CJK}]|[^\W{_CJK}]+")


def words(text: str) -> list[str]:
    """The words of a text, case, width and punctuation folded away."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def normalise_text(text: str) -> str:
    """Text by which two prompts count as the same; texts without a word keep their characters."""
    return " ".join(words(text)) or text.strip()


def near_duplicate_groups(texts: Sequence[str], overlap: float = OVERLAP) -> list[int]:
    """Group of each text: the index of the group's first member. Grouping is transitive.

    Exact for every pair; 100,000 prompts of 40 words take some 20 seconds.
    """
    import numpy as np

    parent = list(range(len(texts)))

    def find(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    def union(i: int, j: int) -> None:
        a, b = find(i), find(j)
        parent[max(a, b)] = min(a, b)

    first: dict[str, int] = {}
    folded = [words(text) for text in texts]
    distinct = []
    for i, parts in enumerate(folded):
        key = " ".join(parts) or texts[i].strip()
        if first.setdefault(key, i) == i:
            distinct.append(i)
        else:
            union(first[key], i)

    sets = _shingle_ranks([folded[i] for i in distinct])
    # Dice > t is Jaccard > t / (2 - t); its prefix filter needs |x| - ceil(j |x|) + 1 of the rarest elements.
    jaccard = overlap / (2 - overlap)
    posted: dict[int, list[tuple[int, int]]] = {}
    order = sorted(range(len(distinct)), key=lambda k: (len(sets[k]), k))
    for k in order:
        mine = sets[k]
        size = len(mine)
        prefix = mine[: size - math.ceil(jaccard * size) + 1].tolist()
        seen: set[int] = set()
        for at, rank in enumerate(prefix):
            for other, place in posted.get(rank, ()):
                if other in seen:
                    continue
                seen.add(other)
                theirs = sets[other]
                needed = overlap * (size + len(theirs)) / 2
                # The rarest shared element stands here: nothing before it can be shared.
                if min(size - at, len(theirs) - place) <= needed or find(distinct[k]) == find(distinct[other]):
                    continue
                if len(np.intersect1d(mine, theirs, assume_unique=True)) > needed:
                    union(distinct[k], distinct[other])
        for at, rank in enumerate(prefix):
            posted.setdefault(rank, []).append((k, at))
    return [find(i) for i in range(len(texts))]


def assign(
    texts: Sequence[str], *, evaluation: int, validation_share: float, seed: int
) -> tuple[list[Split], list[int]]:
    """Split of each text, and its near-duplicate group.

    Groups are ranked by a seeded hash of their (normalised) text; the first `evaluation` groups are held back, the
    next ones validate until `validation_share` of the rest is reached. Adding texts never moves one from training into
    evaluation unless it joins such a group: an older draft's training set does not meet a newer evaluation set.
    """
    groups = near_duplicate_groups(texts)
    members: dict[int, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    ranked = sorted(
        members.values(), key=lambda indices: min(seeded_hash(normalise_text(texts[i]), seed) for i in indices)
    )
    splits: list[Split] = ["train"] * len(texts)
    for indices in ranked[:evaluation]:
        for i in indices:
            splits[i] = "evaluation"
    rest = ranked[evaluation:]
    wanted = math.ceil(validation_share * sum(len(indices) for indices in rest))
    taken = 0
    for indices in rest[:-1]:  # one group always trains
        if taken >= wanted:
            break
        for i in indices:
            splits[i] = "validation"
        taken += len(indices)
    return splits, groups


def seeded_hash(text: str, seed: int) -> str:
    """Hex digest that ranks texts; equal for equal seed and text on every machine."""
    return hashlib.sha256(f"{seed}\n{text}".encode()).hexdigest()


def _shingle_ranks(texts: Sequence[Sequence[str]]) -> list[Ints]:
    """Each text's set of word pairs as sorted ranks, the rarest pair of the corpus first."""
    import numpy as np

    ids: dict[str, int] = {}
    sets: list[Ints] = []
    for parts in texts:
        row = np.fromiter((ids.setdefault(word, len(ids)) for word in parts), np.int64, len(parts))
        pairs = row[:-1] << 31 | row[1:] if len(row) > 1 else -1 - row
        sets.append(np.unique(pairs))
    if not sets:
        return []
    flat = np.concatenate(sets)
    distinct, inverse, counts = np.unique(flat, return_inverse=True, return_counts=True)
    rank = np.empty(len(distinct), np.int64)
    rank[np.argsort(counts, kind="stable")] = np.arange(len(distinct))
    ranked = rank[inverse]
    bounds = np.cumsum([len(item) for item in sets])[:-1]
    return [np.sort(part) for part in np.split(ranked, bounds)]
