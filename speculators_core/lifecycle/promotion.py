"""Promotion: which version of a deployment's draft serves, moved by compare-and-set and written down.

    candidate ── gate passed ──► champion          the displaced champion ──► previous
    champion ◄── rollback ────── previous

A version pins its verifier by fingerprint, so moving `champion` moves the *pair*. The alias moves only if what serves
still is what the caller saw, under a lock of the state root. Every move is written ahead to an audit log, whose order
is the order of events (clocks may jump), and a move that was cut off is finished by whoever comes next. A champion
that the log does not know was made by somebody else's hand: `settle` follows it only where the version is proven.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal, Protocol

from pydantic import Field, ValidationError

from speculators_core.engine.runtime import UNTESTED
from speculators_core.errors import RegistryError
from speculators_core.lifecycle.matrix import FINGERPRINT_TAG, GATE_TAG, RUNTIME_TAG, cell_of
from speculators_core.locks import named_lock
from speculators_core.types import StrictModel

__all__ = [
    "CHALLENGER",
    "CHAMPION",
    "FINGERPRINT_TAG",
    "GATE_TAG",
    "PREVIOUS",
    "RUNTIME_TAG",
    "AliasRegistry",
    "AuditEntry",
    "Promotion",
    "Settled",
    "audit_log",
    "forced_by",
    "may_follow",
    "may_serve",
    "promote",
    "rollback",
    "served_by",
    "settle",
    "to_undo",
]

CHAMPION, CHALLENGER, PREVIOUS = "champion", "challenger", "previous"
Action = Literal["promote", "rollback", "follow", "refuse"]

_LOCK_TIMEOUT_S = 30.0
"""How long a promoter that was stopped may hold up another, or a supervisor."""


class AliasRegistry(Protocol):
    """What promotion needs of a model registry; RegistryError when it refuses or is away."""

    def get_alias(self, model: str, alias: str) -> str | None:
        """Version that the alias names, or None."""
        ...

    def set_alias(self, model: str, alias: str, version: str) -> None:
        """Point the alias at a version, whatever it named before."""
        ...

    def delete_alias(self, model: str, alias: str) -> None:
        """Remove the alias; nothing happens where it does not exist."""
        ...

    def tags(self, model: str, version: str) -> Mapping[str, str]:
        """Tags of a version; RegistryError where there is no such version."""
        ...


class AuditEntry(StrictModel):
    """One line of the audit log. A move is intended (written before it) and then done.

    promote, rollback: moves of ours · follow: a move by other hands that was taken over · refuse: one that was not, so
    that `from_version` goes on serving. to_version is None where other hands removed the alias.
    """

    time: float = Field(description="seconds since 1970 by the writer's clock; the log's order counts, not this")
    model: str
    action: Action
    state: Literal["intended", "done"]
    who: str
    from_version: str | None
    to_version: str | None
    why: str
    forced: bool = False


class Promotion(StrictModel):
    """What a promotion or a rollback did; `changed` is False where the version served already."""

    model: str
    version: str
    displaced: str | None
    changed: bool
    noted: bool = Field(False, description="nothing moved, but that it serves by force is in the audit log now")


class Settled(StrictModel):
    """What serves, and what the alias says where other hands have moved it."""

    version: str | None = Field(description="the version that serves; None: none yet")
    alias: str | None = Field(description="the version that `champion` names")
    reason: str
    news: bool = Field(description="whether this call found the move, and wrote it down")


def may_serve(tags: Mapping[str, str], *, verifier_fingerprint: str, runtime_key: str) -> tuple[bool, str]:
    """Whether a version with these tags may serve this verifier on this runtime, and why not.

    Only a proven cell of the matrix will do: nobody has shown that an untested pair works.
    """
    cell = cell_of(tags, verifier_fingerprint=verifier_fingerprint, runtime_key=runtime_key)
    if cell.state == "proven":
        return True, "it passed the gate on this verifier and runtime"
    if cell.pair.runtime_key.startswith(UNTESTED):
        return False, "it is untested: the server does not say what it runs, so nothing measured there is a proof"
    if cell.outcome is not None:
        return False, f"the gate's outcome on this verifier and runtime is {cell.outcome}"
    for tag, wanted, thing in (
        (FINGERPRINT_TAG, verifier_fingerprint, "verifier"),
        (RUNTIME_TAG, runtime_key, "runtime"),
    ):
        if (found := tags.get(tag)) != wanted:
            said = f"{found[:12]}…" if found else "none"
            return False, f"it is untested on this {thing} (`{tag}` is {said}, wanted {wanted[:12]}…)"
    return False, "it is untested on this verifier and runtime: the gate has not looked"


def may_follow(
    tags: Mapping[str, str], served: str | None, *, runtime_key: str, fingerprint: str | None = None
) -> tuple[bool, str]:
    """Whether a version that other hands made champion now serves, by its tags, and why not.

    Args:
        served: what served before, by the log. Where the log knows of nothing, the alias may have been moved from
            another state root: who only asks what serves then follows it if it is proven where it was registered.
        runtime_key: of the runtime at hand.
        fingerprint: of the version's verifier as it lies here; None: as it was registered.
    """
    if fingerprint is None:
        fingerprint = tags.get(FINGERPRINT_TAG, "")
        runtime_key = tags.get(RUNTIME_TAG, "") if served is None else runtime_key
    return may_serve(tags, verifier_fingerprint=fingerprint, runtime_key=runtime_key)


def promote(
    registry: AliasRegistry,
    model: str,
    version: str,
    *,
    expected: str | None,
    verifier_fingerprint: str,
    runtime_key: str,
    who: str,
    why: str,
    home: Path,
    force: bool = False,
) -> Promotion:
    """Make `version` the champion if what serves still is `expected`; remember the displaced one as `previous`.

    Running it again after a kill at any point ends in the same state.

    Args:
        expected: the version that the gate compared with; None where nothing served.
        force: promote against `may_serve`; the audit entry says so, with `who`, also where the version serves already.

    Raises: RegistryError when another promotion came first, or the version may not serve.
    """
    with _locked(home, model):
        _finish(registry, model, home)
        serving = _settle(registry, model, home, runtime_key=runtime_key)
        tags = registry.tags(model, version)
        allowed, reason = may_serve(tags, verifier_fingerprint=verifier_fingerprint, runtime_key=runtime_key)
        entry = _entry(model, "promote", serving.version, version, who, why, forced=None if allowed else reason)
        if serving.version == version == serving.alias:
            noted = force and not allowed  # it may have come to serve by a proof for something else
            if noted:
                _append(home, entry.model_copy(update={"state": "done"}))
            return Promotion(model=model, version=version, displaced=None, changed=False, noted=noted)
        if serving.version != expected:
            raise RegistryError(
                f"the champion of {model} is {_named(serving.version)}, not {_named(expected)} as the gate saw it",
                mend="evaluate the candidate against the present champion, then promote again",
            )
        if not allowed and not force:
            raise RegistryError(
                f"version {version} of {model} may not serve: {reason}", mend="test it on this verifier and runtime"
            )
        _move(registry, home, entry)
        return Promotion(model=model, version=version, displaced=expected, changed=True)


def rollback(
    registry: AliasRegistry,
    model: str,
    *,
    expected: str | None,
    who: str,
    why: str,
    home: Path,
    check: Callable[[str, Mapping[str, str]], None] = lambda version, tags: None,
) -> Promotion:
    """Undo the last move of `champion`, if it still is `expected`: ours, or one by other hands.

    `previous` is used up, so that two rollbacks never bring back the version that disappointed. Running it again after
    a kill finishes that rollback, and makes no second one.

    Args:
        expected: the version that disappointed; `to_undo`, where that is whichever serves.
        check: called with the version to bring back and its tags before anything moves; raises to prevent it.

    Raises: RegistryError when the champion has changed, there is nothing to roll back to, or that version is gone.
    """
    with _locked(home, model):
        finished = _finish(registry, model, home)
        if finished is not None and finished.action == "rollback" and finished.from_version == expected:
            return _promotion(finished)  # it was cut off, and asked for again
        champion, entries = registry.get_alias(model, CHAMPION), audit_log(home, model)
        if champion != expected:
            raise RegistryError(
                f"the champion of {model} is {_named(champion)}, not {_named(expected)}: it was moved meanwhile",
                mend="look at `draftsmith history` before rolling back",
            )
        before = [served_by(entries), registry.get_alias(model, PREVIOUS)]  # a hand-made move is undone first
        known = [version for version in before if version is not None and version != champion]
        tags = {version: found for version in known if (found := _tags_or_none(registry, model, version)) is not None}
        if not tags:
            gone = f": version {', '.join(known)} was deleted" if known else ""
            raise RegistryError(
                f"{model} has no previous version to roll back to{gone}", mend="promote a version by name"
            )
        target = next(iter(tags))
        check(target, tags[target])
        entry = _entry(model, "rollback", champion, target, who, why)
        _move(registry, home, entry)
        return _promotion(entry)


def to_undo(registry: AliasRegistry, model: str, home: Path) -> str | None:
    """The champion that a rollback asked for now takes back: of one that was cut off, the one that it was to."""
    champion, entries = registry.get_alias(model, CHAMPION), audit_log(home, model)
    last = entries[-1] if entries else None
    if last is not None and (last.action, last.state, last.to_version) == ("rollback", "intended", champion):
        return last.from_version
    return champion


def settle(
    registry: AliasRegistry, model: str, *, runtime_key: str, fingerprint: str | None = None, home: Path
) -> Settled:
    """Which version serves now, moves by other hands included; what serving asks before it follows the alias.

    A hand-made move is followed where `may_follow` says so: it then counts as a promotion. Else what served goes on
    serving. Either is written to the audit log, once.

    Args:
        runtime_key, fingerprint: the pair at hand; as for `may_follow`.
    """
    with _locked(home, model):
        _finish(registry, model, home)
        return _settle(registry, model, home, runtime_key=runtime_key, fingerprint=fingerprint)


def audit_log(home: Path, model: str) -> tuple[AuditEntry, ...]:
    """Every entry of a model, oldest first; a line torn by a crash at the very end is left out.

    Raises:
        RegistryError: another line is none of ours. Left out, it could hide the move by which something else serves.
    """
    path = _audit_path(home)
    if not path.exists():
        return ()
    lines = path.read_bytes().split(b"\n")
    entries = []
    # what follows the last newline was never finished
    for number, line in enumerate(lines[:-1], start=1):
        try:
            entry = AuditEntry.model_validate_json(line) if line.strip() else None
        except ValidationError as error:
            raise RegistryError(
                f"line {number} of the audit log {path} cannot be read: {error.errors()[0]['msg']}",
                mend="put the line right from a backup, or delete it; what serves is what the last whole line says",
            ) from error
        if entry is not None and entry.model == model:
            entries.append(entry)
    return tuple(entries)


def served_by(entries: Sequence[AuditEntry]) -> str | None:
    """The version that serves by the log: where the last finished move led."""
    done = [entry for entry in entries if entry.state == "done" and entry.action != "refuse"]
    return done[-1].to_version if done else None


def forced_by(entries: Sequence[AuditEntry], version: str) -> str | None:
    """Who promoted a version by force, if its last promotion was by force; a rollback onto it takes nothing away."""
    promotions = [e for e in entries if (e.action, e.state, e.to_version) == ("promote", "done", version)]
    return promotions[-1].who if promotions and promotions[-1].forced else None


def _move(registry: AliasRegistry, home: Path, entry: AuditEntry) -> None:
    _append(home, entry)
    assert entry.to_version is not None
    registry.set_alias(entry.model, CHAMPION, entry.to_version)
    _complete(registry, home, entry)


def _complete(registry: AliasRegistry, home: Path, entry: AuditEntry) -> None:
    """What follows once `champion` has moved; every step may be repeated."""
    model, version = entry.model, entry.to_version
    if entry.action == "rollback":
        if registry.get_alias(model, PREVIOUS) == version:
            registry.delete_alias(model, PREVIOUS)
    elif entry.from_version not in (None, version):
        assert entry.from_version is not None
        registry.set_alias(model, PREVIOUS, entry.from_version)
    if registry.get_alias(model, CHALLENGER) == version:
        registry.delete_alias(model, CHALLENGER)
    _append(home, entry.model_copy(update={"state": "done", "time": time.time()}))


def _finish(registry: AliasRegistry, model: str, home: Path) -> AuditEntry | None:
    """Finish a move that was cut off after `champion` had moved; one cut off before that has changed nothing."""
    entries = audit_log(home, model)
    if not entries or entries[-1].state == "done" or registry.get_alias(model, CHAMPION) != entries[-1].to_version:
        return None
    _complete(registry, home, entries[-1])
    return entries[-1]


def _settle(
    registry: AliasRegistry, model: str, home: Path, *, runtime_key: str, fingerprint: str | None = None
) -> Settled:
    champion, entries = registry.get_alias(model, CHAMPION), audit_log(home, model)
    served = served_by(entries)
    if champion == served:
        return Settled(version=served, alias=champion, reason="the last move was ours", news=False)
    allowed, reason = False, "the alias was removed"
    if champion is not None:
        tags = _tags_or_none(registry, model, champion)
        if tags is None:
            reason = "there is no such version"
        else:
            allowed, reason = may_follow(tags, served, runtime_key=runtime_key, fingerprint=fingerprint)
    action: Action = "follow" if allowed else "refuse"
    why = f"`{CHAMPION}` was moved by other hands: {reason}"
    entry = _entry(model, action, served, champion, "unknown", why)
    if allowed:
        _append(home, entry)
        _complete(registry, home, entry)
        return Settled(version=champion, alias=champion, reason=why, news=True)
    last = entries[-1] if entries else None
    news = last is None or (last.action, last.to_version, last.why) != (action, champion, why)
    if news:
        _append(home, entry.model_copy(update={"state": "done"}))
    return Settled(version=served, alias=champion, reason=why, news=news)


def _tags_or_none(registry: AliasRegistry, model: str, version: str) -> Mapping[str, str] | None:
    """Tags of a version, None where there is none; RegistryError only where the registry is away."""
    try:
        return registry.tags(model, version)
    except RegistryError:
        registry.get_alias(model, CHAMPION)  # it answers, so the version is gone
        return None


def _entry(
    model: str, action: Action, old: str | None, new: str | None, who: str, why: str, *, forced: str | None = None
) -> AuditEntry:
    return AuditEntry(
        time=time.time(),
        model=model,
        action=action,
        state="intended",
        who=who,
        from_version=old,
        to_version=new,
        why=why if forced is None else f"{why} (forced although {forced})",
        forced=forced is not None,
    )


def _promotion(entry: AuditEntry) -> Promotion:
    assert entry.to_version is not None
    return Promotion(model=entry.model, version=entry.to_version, displaced=entry.from_version, changed=True)


def _append(home: Path, entry: AuditEntry) -> None:
    path = _audit_path(home)
    path.parent.mkdir(parents=True, exist_ok=True)
    # other models append here too
    with named_lock(home / "locks", "promotions", timeout_s=_LOCK_TIMEOUT_S), path.open("a+b") as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
            if file.read(1) != b"\n":  # a torn line of a crash: drop it, it was never read
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
        file.write(entry.model_dump_json().encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _audit_path(home: Path) -> Path:
    return home / "promotions.jsonl"


def _locked(home: Path, model: str) -> AbstractContextManager[None]:
    """One promotion of a model at a time."""
    return named_lock(home / "locks", f"promotion-{model}", timeout_s=_LOCK_TIMEOUT_S)


def _named(version: str | None) -> str:
    return "none" if version is None else f"version {version}"
