"""Marks and sweeps as plain numbers: what stays, what goes, and in which order."""

from __future__ import annotations

from speculators_core.lifecycle.retention import DAY_S, Item, Plan, Root, plan_sweep

NOW = 1000 * DAY_S


def item(name: str, idle_days: float, *inputs: str, num_bytes: int = 10, known: bool = True) -> Item:
    return Item(
        name=f"kind/{name}",
        digest=name,
        num_bytes=num_bytes,
        used=NOW - idle_days * DAY_S,
        inputs=inputs if known else None,
    )


def gone(plan: Plan) -> list[str]:
    return [line.digest for line in plan.deletions]


LOOP = [
    item("dataset", 90, "sources"),
    item("states", 90, "dataset", "verifier"),
    item("training", 90, "states"),
    item("draft", 90, "training"),
    item("evaluation", 90, "measurement"),
    item("measurement", 90, "draft", "dataset"),
]


def test_a_root_with_lineage_keeps_all_that_it_was_made_of_and_another_only_itself():
    kept = plan_sweep(LOOP, [Root(digest="draft", reason="champion", lineage=True)], now=NOW, keep_days=14)
    assert gone(kept) == ["evaluation", "measurement"]
    assert {line.reason for line in kept.lines if line.fate == "keep"} == {"champion"}
    alone = plan_sweep(LOOP, [Root(digest="draft", reason="registered")], now=NOW, keep_days=14)
    assert gone(alone) == ["dataset", "evaluation", "measurement", "states", "training"]


def test_without_roots_age_alone_decides():
    items = [item("old", 15), item("young", 13), item("tomorrow", -3)]
    assert gone(plan_sweep(items, [], now=NOW, keep_days=14)) == ["old"]


def test_what_has_no_recorded_lineage_stays():
    items = [item("before", 500, known=False), item("after", 500)]
    plan = plan_sweep(items, [], now=NOW, keep_days=14, quota_bytes=0)
    assert gone(plan) == ["after"]
    assert plan.over_quota == 10


def test_the_quota_takes_the_least_recently_used_first_and_never_marked_or_fresh_ones():
    items = [item("a", 5), item("b", 3), item("marked", 9), item("fresh", 0.01), item("c", 4)]
    roots = [Root(digest="marked", reason="pinned")]
    assert gone(plan_sweep(items, roots, now=NOW, keep_days=14, quota_bytes=50)) == []
    assert gone(plan_sweep(items, roots, now=NOW, keep_days=14, quota_bytes=35)) == ["a", "c"]
    least = plan_sweep(items, roots, now=NOW, keep_days=14, quota_bytes=5)
    assert gone(least) == ["a", "b", "c"]
    assert (least.kept_bytes, least.freed_bytes, least.over_quota) == (20, 30, 15)


def test_marks_follow_lineage_through_circles_and_unknown_digests():
    items = [item("x", 90, "y", "elsewhere"), item("y", 90, "x")]
    assert gone(plan_sweep(items, [Root(digest="y", reason="r", lineage=True)], now=NOW, keep_days=1)) == []
