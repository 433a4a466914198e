"""Promotion over a registry in memory: what moves, what is refused, and what a crash or a race leaves."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from speculators_core.errors import RegistryError
from speculators_core.lifecycle import promotion
from speculators_core.lifecycle.promotion import (
    CHALLENGER,
    CHAMPION,
    FINGERPRINT_TAG,
    GATE_TAG,
    PREVIOUS,
    RUNTIME_TAG,
    Promotion,
    audit_log,
    forced_by,
    may_serve,
    promote,
    rollback,
    settle,
    to_undo,
)
from speculators_core.locks import named_lock

GOOD = {FINGERPRINT_TAG: "f" * 64, RUNTIME_TAG: "r" * 64, GATE_TAG: "pass"}


class MemoryRegistry:
    """The protocol's smallest implementation; dies after `lives` writes, as a killed process would."""

    def __init__(self, versions: Mapping[str, Mapping[str, str]]) -> None:
        self.versions: dict[str, Mapping[str, str]] = dict(versions)
        self.aliases: dict[tuple[str, str], str] = {}
        self.lives = 10**6

    def get_alias(self, model: str, alias: str) -> str | None:
        return self.aliases.get((model, alias))

    def set_alias(self, model: str, alias: str, version: str) -> None:
        self._live()
        self.aliases[model, alias] = version

    def delete_alias(self, model: str, alias: str) -> None:
        self._live()
        self.aliases.pop((model, alias), None)

    def tags(self, model: str, version: str) -> Mapping[str, str]:
        if version not in self.versions:
            raise RegistryError(f"no version {version}")
        return self.versions[version]

    def _live(self) -> None:
        if self.lives == 0:
            raise KeyboardInterrupt
        self.lives -= 1


@pytest.fixture
def registry() -> MemoryRegistry:
    return MemoryRegistry({name: GOOD for name in "123456789"})


def move(registry: MemoryRegistry, version: str, expected: str | None, home: Path, **extra: object) -> Promotion:
    return promote(
        registry,
        "chat",
        version,
        expected=expected,
        verifier_fingerprint="f" * 64,
        runtime_key="r" * 64,
        who="a test",
        why="because",
        home=home,
        **extra,  # type: ignore[arg-type]
    )


def test_promotion_remembers_the_displaced_champion_and_clears_the_challenger(registry, tmp_path):
    assert move(registry, "1", None, tmp_path) == Promotion(model="chat", version="1", displaced=None, changed=True)
    registry.set_alias("chat", CHALLENGER, "2")
    assert move(registry, "2", "1", tmp_path).displaced == "1"
    assert registry.aliases == {("chat", CHAMPION): "2", ("chat", PREVIOUS): "1"}


def test_promoting_the_champion_again_changes_nothing_and_writes_nothing(registry, tmp_path):
    move(registry, "1", None, tmp_path)
    before = audit_log(tmp_path, "chat")
    assert not move(registry, "1", None, tmp_path).changed
    assert audit_log(tmp_path, "chat") == before


def test_a_stale_view_of_the_champion_is_refused(registry, tmp_path):
    move(registry, "1", None, tmp_path)
    with pytest.raises(RegistryError, match="version 1, not none"):
        move(registry, "2", None, tmp_path)
    assert registry.get_alias("chat", CHAMPION) == "1"


@pytest.mark.parametrize("tag", [FINGERPRINT_TAG, RUNTIME_TAG, GATE_TAG])
@pytest.mark.parametrize("value", [None, "other"])
def test_a_version_unproven_for_this_pair_is_refused_unless_forced_and_then_says_so(registry, tmp_path, tag, value):
    tags = {key: found for key, found in GOOD.items() if key != tag} | ({tag: value} if value else {})
    registry.versions = {"1": tags}
    assert not may_serve(tags, verifier_fingerprint="f" * 64, runtime_key="r" * 64)[0]
    with pytest.raises(RegistryError, match="may not serve"):
        move(registry, "1", None, tmp_path)
    assert registry.aliases == {}
    assert move(registry, "1", None, tmp_path, force=True).changed
    entry = audit_log(tmp_path, "chat")[-1]
    assert entry.forced
    assert entry.who == "a test"
    assert "forced although" in entry.why


def test_rollback_brings_back_the_previous_once(registry, tmp_path):
    move(registry, "1", None, tmp_path)
    move(registry, "2", "1", tmp_path)
    with pytest.raises(RegistryError, match="moved meanwhile"):
        rollback(registry, "chat", expected="1", who="t", why="w", home=tmp_path)
    done = rollback(registry, "chat", expected="2", who="t", why="AL fell", home=tmp_path)
    assert (done.version, done.displaced) == ("1", "2")
    assert registry.aliases == {("chat", CHAMPION): "1"}
    with pytest.raises(RegistryError, match="no previous"):
        rollback(registry, "chat", expected="1", who="t", why="w", home=tmp_path)


def test_of_two_promoters_with_one_view_exactly_one_wins(registry, tmp_path):
    move(registry, "1", None, tmp_path)
    outcomes: list[str] = []
    barrier = threading.Barrier(8)

    def run(version: str) -> None:
        barrier.wait()
        try:
            move(registry, version, "1", tmp_path)
            outcomes.append("won")
        except RegistryError:
            outcomes.append("lost")

    threads = [threading.Thread(target=run, args=(str(n),)) for n in range(2, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["lost"] * 7 + ["won"]
    assert registry.get_alias("chat", PREVIOUS) == "1"
    assert len(audit_log(tmp_path, "chat")) == 4


@pytest.mark.parametrize("lives", range(5))
def test_a_promotion_killed_at_any_write_ends_right_when_run_again(registry, tmp_path, lives):
    move(registry, "1", None, tmp_path)
    registry.set_alias("chat", CHALLENGER, "2")
    registry.lives = lives
    try:
        move(registry, "2", "1", tmp_path)
    except KeyboardInterrupt:
        registry.lives = 100
        move(registry, "2", "1", tmp_path)
    assert registry.aliases == {("chat", CHAMPION): "2", ("chat", PREVIOUS): "1"}
    assert [entry.state for entry in audit_log(tmp_path, "chat")][-1] == "done"


def test_the_audit_log_is_written_ahead_survives_a_torn_line_and_keeps_models_apart(registry, tmp_path):
    registry.lives = 0
    with pytest.raises(KeyboardInterrupt):
        move(registry, "1", None, tmp_path)
    assert [entry.state for entry in audit_log(tmp_path, "chat")] == ["intended"]
    registry.lives = 100
    with (tmp_path / "promotions.jsonl").open("a") as file:
        file.write('{"time": 1.0, "mod')
    assert len(audit_log(tmp_path, "chat")) == 1
    move(registry, "1", None, tmp_path)
    assert [entry.state for entry in audit_log(tmp_path, "chat")] == ["intended", "intended", "done"]
    assert audit_log(tmp_path, "another") == ()


@pytest.mark.parametrize("lives", range(4))
def test_a_rollback_killed_at_any_write_ends_right_when_run_again(registry, tmp_path, lives):
    move(registry, "1", None, tmp_path)
    move(registry, "2", "1", tmp_path)
    registry.lives = lives
    try:
        rollback(registry, "chat", expected="2", who="t", why="w", home=tmp_path)
    except KeyboardInterrupt:
        registry.lives = 100
        done = rollback(registry, "chat", expected="2", who="t", why="w", home=tmp_path)
        assert (done.version, done.displaced) == ("1", "2")
    assert registry.aliases == {("chat", CHAMPION): "1"}
    assert audit_log(tmp_path, "chat")[-1].state == "done"


@pytest.mark.parametrize("lives", range(2))
def test_a_rollback_run_again_after_a_kill_is_one_rollback_by_what_the_alias_says_then(registry, tmp_path, lives):
    move(registry, "1", None, tmp_path)
    move(registry, "2", "1", tmp_path)
    registry.lives = lives
    with pytest.raises(KeyboardInterrupt):
        rollback(registry, "chat", expected="2", who="t", why="w", home=tmp_path)
    registry.lives = 100
    assert registry.get_alias("chat", CHAMPION) == "21"[lives]
    expected = to_undo(registry, "chat", tmp_path)
    done = rollback(registry, "chat", expected=expected, who="t", why="w", home=tmp_path)
    assert (done.version, done.displaced) == ("1", "2")
    assert registry.aliases == {("chat", CHAMPION): "1"}


def test_a_rollback_of_a_move_by_hand_killed_and_run_again_is_one_rollback(registry, tmp_path, monkeypatch):
    registry.versions["unproven"] = {}
    move(registry, "1", None, tmp_path)
    move(registry, "2", "1", tmp_path)
    registry.set_alias("chat", CHAMPION, "unproven")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(promotion, "_complete", killed)
    with pytest.raises(KeyboardInterrupt):
        rollback(registry, "chat", expected="unproven", who="t", why="w", home=tmp_path)
    monkeypatch.undo()
    assert to_undo(registry, "chat", tmp_path) == "unproven"
    assert rollback(registry, "chat", expected="unproven", who="t", why="w", home=tmp_path).version == "2"
    assert registry.aliases == {("chat", CHAMPION): "2", ("chat", PREVIOUS): "1"}
    assert to_undo(registry, "chat", tmp_path) == "2", "the next one is another"


def test_whoever_comes_next_finishes_what_was_cut_off(registry, tmp_path):
    move(registry, "1", None, tmp_path)
    registry.lives = 1  # the alias moves, and the promoter dies before it can remember the previous one
    with pytest.raises(KeyboardInterrupt):
        move(registry, "2", "1", tmp_path)
    registry.lives = 100
    assert settle(registry, "chat", runtime_key="r" * 64, home=tmp_path).version == "2"
    assert registry.get_alias("chat", PREVIOUS) == "1"
    assert rollback(registry, "chat", expected="2", who="t", why="w", home=tmp_path).version == "1"


PAIR = {"fingerprint": "f" * 64, "runtime_key": "r" * 64}


def test_a_proven_version_that_other_hands_made_champion_is_followed_and_can_be_rolled_back(registry, tmp_path):
    move(registry, "1", None, tmp_path)
    registry.set_alias("chat", CHAMPION, "2")
    found = settle(registry, "chat", **PAIR, home=tmp_path)
    assert (found.version, found.alias, found.news) == ("2", "2", True)
    assert not settle(registry, "chat", **PAIR, home=tmp_path).news
    entry = audit_log(tmp_path, "chat")[-1]
    assert (entry.action, entry.from_version, entry.to_version, entry.state) == ("follow", "1", "2", "done")
    assert rollback(registry, "chat", expected="2", who="t", why="w", home=tmp_path).version == "1"


@pytest.mark.parametrize("moved_to", ["unproven", "deleted", None])
def test_an_unproven_champion_by_other_hands_changes_nothing_but_the_log_once(registry, tmp_path, moved_to):
    registry.versions["unproven"] = {**GOOD, GATE_TAG: "fail"}
    move(registry, "1", None, tmp_path)
    move(registry, "2", "1", tmp_path)
    if moved_to is None:
        registry.delete_alias("chat", CHAMPION)
    else:
        registry.set_alias("chat", CHAMPION, moved_to)
    for news in (True, False, False):
        found = settle(registry, "chat", **PAIR, home=tmp_path)
        assert (found.version, found.alias, found.news) == ("2", moved_to, news)
    entries = audit_log(tmp_path, "chat")
    assert [entry.action for entry in entries].count("refuse") == 1
    # the next promotion is measured against what serves, and remembers that as the previous one
    assert move(registry, "3", "2", tmp_path).displaced == "2"
    assert registry.aliases == {("chat", CHAMPION): "3", ("chat", PREVIOUS): "2"}


def test_rollback_undoes_a_move_by_other_hands_and_keeps_the_previous(registry, tmp_path):
    registry.versions["unproven"] = {}
    move(registry, "1", None, tmp_path)
    move(registry, "2", "1", tmp_path)
    registry.set_alias("chat", CHAMPION, "unproven")
    assert rollback(registry, "chat", expected="unproven", who="t", why="w", home=tmp_path).version == "2"
    assert registry.aliases == {("chat", CHAMPION): "2", ("chat", PREVIOUS): "1"}


def test_promoting_what_serves_puts_an_alias_back_that_other_hands_moved(registry, tmp_path):
    registry.versions["unproven"] = {}
    move(registry, "1", None, tmp_path)
    move(registry, "2", "1", tmp_path)
    registry.set_alias("chat", CHAMPION, "unproven")
    assert move(registry, "2", "2", tmp_path).changed
    assert registry.aliases == {("chat", CHAMPION): "2", ("chat", PREVIOUS): "1"}


def test_a_registry_that_is_away_is_no_verdict_on_a_version(registry, tmp_path):
    move(registry, "1", None, tmp_path)
    registry.set_alias("chat", CHAMPION, "2")

    class Away(MemoryRegistry):
        def get_alias(self, model: str, alias: str) -> str | None:
            if self.asked:
                raise RegistryError("away")
            return super().get_alias(model, alias)

        asked = False

        def tags(self, model: str, version: str) -> Mapping[str, str]:
            self.asked = True
            raise RegistryError("away")

    away = Away(registry.versions)
    away.aliases = registry.aliases
    with pytest.raises(RegistryError, match="away"):
        settle(away, "chat", **PAIR, home=tmp_path)
    assert settle(registry, "chat", **PAIR, home=tmp_path).version == "2"


def test_a_rollback_to_a_version_that_is_gone_moves_nothing(registry, tmp_path):
    move(registry, "1", None, tmp_path)
    move(registry, "2", "1", tmp_path)
    del registry.versions["1"]
    with pytest.raises(RegistryError, match="version 1 was deleted"):
        rollback(registry, "chat", expected="2", who="t", why="w", home=tmp_path)
    assert registry.get_alias("chat", CHAMPION) == "2"


def test_another_state_root_rolls_back_by_the_aliases_alone(registry, tmp_path):
    move(registry, "1", None, tmp_path / "a")
    move(registry, "2", "1", tmp_path / "a")
    assert rollback(registry, "chat", expected="2", who="t", why="w", home=tmp_path / "b").version == "1"


def test_a_clock_that_jumps_back_changes_no_order(registry, tmp_path, monkeypatch):
    moments = iter([900.0, 901.0, 100.0, 101.0, 50.0, 51.0])
    monkeypatch.setattr("speculators_core.lifecycle.promotion.time.time", lambda: next(moments))
    move(registry, "1", None, tmp_path)
    move(registry, "2", "1", tmp_path)
    assert settle(registry, "chat", **PAIR, home=tmp_path).version == "2"
    rollback(registry, "chat", expected="2", who="t", why="w", home=tmp_path)
    assert [entry.to_version for entry in audit_log(tmp_path, "chat")] == ["1", "1", "2", "2", "1", "1"]


@pytest.mark.parametrize("line", [b'{"torn', b"\xff\xfe", b"[]", b'{"model": "m"}'])
def test_a_line_of_the_audit_log_that_is_none_of_ours_is_named_and_nothing_moves(registry, tmp_path, line):
    move(registry, "1", None, tmp_path)
    log = tmp_path / "promotions.jsonl"
    log.write_bytes(line + b"\n" + log.read_bytes())
    before = log.read_bytes()
    with pytest.raises(RegistryError, match="line 1 of the audit log"):
        move(registry, "2", "1", tmp_path)
    assert registry.get_alias("chat", "champion") == "1" and log.read_bytes() == before


OLD_RUNTIME = "o" * 64
ELSEWHERE = {**GOOD, RUNTIME_TAG: OLD_RUNTIME}


def test_who_asks_what_serves_follows_other_hands_only_where_the_version_is_proven_on_the_runtime_at_hand(
    registry, tmp_path
):
    registry.versions["old"] = ELSEWHERE
    move(registry, "1", None, tmp_path)
    move(registry, "2", "1", tmp_path)
    registry.set_alias("chat", CHAMPION, "old")
    assert settle(registry, "chat", runtime_key="r" * 64, home=tmp_path).version == "2"
    assert audit_log(tmp_path, "chat")[-1].action == "refuse"
    assert move(registry, "3", "2", tmp_path).displaced == "2", "a candidate replaces what really serves"
    assert registry.get_alias("chat", PREVIOUS) == "2"
    registry.set_alias("chat", CHAMPION, "old")
    assert settle(registry, "chat", runtime_key=OLD_RUNTIME, home=tmp_path).version == "old"


def test_what_another_state_root_promoted_elsewhere_counts_for_who_asks_and_not_for_who_serves(registry, tmp_path):
    registry.versions["old"] = ELSEWHERE
    move(registry, "1", None, tmp_path / "other")
    registry.set_alias("chat", CHAMPION, "old")
    assert settle(registry, "chat", **PAIR, home=tmp_path).version is None
    assert settle(registry, "chat", runtime_key="r" * 64, home=tmp_path).version == "old"


def test_what_was_promoted_by_force_keeps_its_permission_through_a_rollback_and_force_can_be_said_again(
    registry, tmp_path
):
    registry.versions["bad"] = {**GOOD, GATE_TAG: "fail"}

    def forcer() -> str | None:
        return forced_by(audit_log(tmp_path, "chat"), "bad")

    move(registry, "1", None, tmp_path)
    assert forcer() is None
    move(registry, "bad", "1", tmp_path, force=True)
    move(registry, "2", "bad", tmp_path)
    rollback(registry, "chat", expected="2", who="t", why="w", home=tmp_path)
    assert forcer() == "a test"

    registry.versions["bad"] = GOOD  # proven by now, and promoted as such
    move(registry, "2", "bad", tmp_path)
    move(registry, "bad", "2", tmp_path)
    assert forcer() is None
    registry.versions["bad"] = {**GOOD, GATE_TAG: "fail"}
    again = move(registry, "bad", "bad", tmp_path)
    assert not again.changed and not again.noted and forcer() is None
    again = move(registry, "bad", "bad", tmp_path, force=True)
    assert not again.changed and again.noted and forcer() == "a test"
    assert registry.aliases == {("chat", CHAMPION): "bad", ("chat", PREVIOUS): "2"}


def test_a_promoter_that_was_stopped_holds_nobody_up_for_ever(registry, tmp_path, monkeypatch):
    monkeypatch.setattr(promotion, "_LOCK_TIMEOUT_S", 0.1)
    for name in ("promotion-chat", "promotions"):
        with (
            named_lock(tmp_path / "locks", name),
            pytest.raises(RegistryError, match=f"process {os.getpid()} has held .*{name}.lock"),
        ):
            move(registry, "1", None, tmp_path)
    assert registry.aliases == {}
    assert move(registry, "1", None, tmp_path).changed
