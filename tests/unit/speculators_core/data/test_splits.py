"""No prompt, and no near-duplicate of one, stands on two sides."""

from __future__ import annotations

import functools
import itertools
import random
import time

import pytest

from speculators_core.data.splits import assign, near_duplicate_groups, normalise_text, words

WORDS = [f"w{i}" for i in range(400)]


@functools.cache
def pairs(text: str) -> frozenset[tuple[str, str]]:
    return frozenset(itertools.pairwise(words(text)))


def dice(a: str, b: str) -> float:
    """The definition, written down again without the filter."""
    left, right = pairs(a), pairs(b)
    return 2 * len(left & right) / (len(left) + len(right))


def corpus(rng: random.Random, size: int, length: int) -> list[str]:
    texts = [" ".join(rng.choices(WORDS, k=rng.randint(length // 2, length))) for _ in range(size)]
    for _ in range(size):  # variants with a few words exchanged, dropped or added
        parts = rng.choice(texts).split()
        for _ in range(rng.randint(0, 3)):
            at = rng.randrange(len(parts))
            parts[at : at + rng.randint(0, 1)] = [rng.choice(WORDS)]
        texts.append(" ".join(parts))
    return texts


def test_the_filter_finds_exactly_the_pairs_above_the_threshold() -> None:
    texts = corpus(random.Random(1), 120, 14)
    parent = list(range(len(texts)))

    def root(i: int) -> int:
        return i if parent[i] == i else root(parent[i])

    for i, j in itertools.combinations(range(len(texts)), 2):
        if normalise_text(texts[i]) == normalise_text(texts[j]) or dice(texts[i], texts[j]) > 0.7:
            a, b = sorted((root(i), root(j)))
            parent[b] = a
    assert near_duplicate_groups(texts) == [root(i) for i in range(len(texts))]
    assert len({root(i) for i in range(len(texts))}) < len(texts) - 40, "the corpus does hold near-duplicates"


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("What is the capital of France?", "what is  the CAPITAL of france", True),
        ("Write a story about a lonely keeper in winter", "Write a story about a lonely keeper in May", True),
        ("Write a short story about a lonely lighthouse keeper", "Explain how a lighthouse lens was made", False),
        ("hi", "hello", False),
        ("???", "!!!", False),
        ("日本の首都はどこですか", "日本の首都はどこですか?", True),
        ("", "", True),
    ],
)  # fmt: skip
def test_what_counts_as_a_near_duplicate(a: str, b: str, same: bool) -> None:
    assert (near_duplicate_groups([a, b]) == [0, 0]) is same


def test_groups_stay_on_one_side_and_evaluation_is_disjoint() -> None:
    texts = corpus(random.Random(2), 300, 20)
    splits, groups = assign(texts, evaluation=40, validation_share=0.1, seed=0)
    for group in set(groups):
        assert len({split for split, member in zip(splits, groups, strict=True) if member == group}) == 1
    held = {group for split, group in zip(splits, groups, strict=True) if split == "evaluation"}
    assert len(held) == 40
    rest = [split for split in splits if split != "evaluation"]
    assert 0.1 <= rest.count("validation") / len(rest) < 0.15
    for a, b in itertools.combinations(range(len(texts)), 2):
        if splits[a] != splits[b]:
            assert dice(texts[a], texts[b]) <= 0.7


def test_growing_data_never_moves_training_prompts_into_evaluation() -> None:
    texts = [f"{a} {b} {c}" for a, b, c in itertools.product("abcdefgh", "ijklmnop", "qrstuv")]
    old, _ = assign(texts[:200], evaluation=20, validation_share=0.1, seed=3)
    new, _ = assign(texts, evaluation=20, validation_share=0.1, seed=3)
    assert not [i for i in range(200) if old[i] != "evaluation" and new[i] == "evaluation"]
    assert assign(texts, evaluation=20, validation_share=0.1, seed=4)[0] != new, "the seed matters"


def test_ten_thousand_prompts_take_seconds() -> None:
    texts = corpus(random.Random(3), 5000, 40)
    started = time.monotonic()
    near_duplicate_groups(texts)
    assert time.monotonic() - started < 10
