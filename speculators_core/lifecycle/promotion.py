"""Promotion: which version of a deployment's draft serves, moved by compare-and-set and written down.

    candidate ── gate passed ──► champion          the displaced champion ──► previous
    champion ◄── rollback ────── previous

A version pins its verifier by fingerprint, so moving `champion` moves the *pair*. The alias moves only if it still is
where the caller saw it, under a lock of the state root, and every move is written ahead to an audit log: a move that
the log does not hold was made by somebody else's hand, and `may_serve` says whether it may be followed.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Protocol

from speculators_core.errors import RegistryError
from speculators_core.types import StrictModel

CHAMPION, CHALLENGER, PREVIOUS = "champion", "challenger", "previous"
FINGERPRINT_TAG = "verifier.fingerprint"
RUNTIME_TAG = "runtime.key"
GATE_TAG = "gate.outcome"


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
    """One line of the audit log. `state` is intended (written before the move) and then done."""

    time: float
    model: str
    action: Literal["promote", "rollback"]
    state: Literal["intended", "done"]
    who: str
    from_version: str | None
    to_version: str
    why: str
    forced: bool = False


class Promotion(StrictModel):
    """What a promotion or a rollback did; `changed` is False where the version served already."""

    model: str
    version: str
    displaced: str | None
    changed: bool


def may_serve(tags: Mapping[str, str], *, verifier_fingerprint: str, runtime_key: str) -> tuple[bool, str]:
    """Whether a version with these tags may serve this verifier on this runtime, and why not.

    A missing tag is a reason against: nobody has shown that the pair works.
    """
    for tag, wanted, thing in (
        (FINGERPRINT_TAG, verifier_fingerprint, "verifier"),
        (RUNTIME_TAG, runtime_key, "runtime"),
    ):
        found = tags.get(tag)
        if found != wanted:
            said = f"{found[:12]}…" if found else "none"
            return False, f"it was measured on another {thing} (`{tag}` is {said}, wanted {wanted[:12]}…)"
    outcome = tags.get(GATE_TAG)
    if outcome != "pass":
        return False, f"it has not passed the gate (`{GATE_TAG}` is {outcome or 'none'})"
    return True, "it passed the gate on this verifier and runtime"


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
    """Make `version` the champion if the champion still is `expected`; remember the displaced one as `previous`.

    Running it again after a kill at any point ends in the same state.

    Args:
        expected: the champion that the gate compared with; None where nothing served.
        force: promote against `may_serve`; the audit entry says so, with `who`.

    Raises: RegistryError when another promotion came first, or the version may not serve.
    """
    with _locked(home, model):
        champion = registry.get_alias(model, CHAMPION)
        tags = registry.tags(model, version)
        if champion == version:
            _clear_challenger(registry, model, version)  # a kill may have come between the two
            return Promotion(model=model, version=version, displaced=None, changed=False)
        if champion != expected:
            raise RegistryError(
                f"the champion of {model} is {_named(champion)}, not {_named(expected)} as the gate saw it",
                mend="evaluate the candidate against the present champion, then promote again",
            )
        allowed, reason = may_serve(tags, verifier_fingerprint=verifier_fingerprint, runtime_key=runtime_key)
        if not allowed and not force:
            raise RegistryError(f"version {version} of {model} may not serve: {reason}", mend="evaluate it first")
        entry = AuditEntry(
            time=time.time(),
            model=model,
            action="promote",
            state="intended",
            who=who,
            from_version=champion,
            to_version=version,
            why=why if allowed else f"{why} (forced although {reason})",
            forced=not allowed,
        )
        _append(home, entry)
        if champion is not None:
            registry.set_alias(model, PREVIOUS, champion)
        registry.set_alias(model, CHAMPION, version)
        _clear_challenger(registry, model, version)
        _append(home, entry.model_copy(update={"state": "done", "time": time.time()}))
        return Promotion(model=model, version=version, displaced=champion, changed=True)


def rollback(registry: AliasRegistry, model: str, *, expected: str, who: str, why: str, home: Path) -> Promotion:
    """Make `previous` the champion again if the champion still is `expected`.

    `previous` is removed, so that two rollbacks never bring back the version that disappointed.

    Raises: RegistryError when the champion has changed, or there is nothing to roll back to.
    """
    with _locked(home, model):
        champion, previous = registry.get_alias(model, CHAMPION), registry.get_alias(model, PREVIOUS)
        if champion != expected:
            raise RegistryError(
                f"the champion of {model} is {_named(champion)}, not {_named(expected)}: it was moved meanwhile",
                mend="look at the audit log before rolling back",
            )
        if previous is None or previous == champion:
            raise RegistryError(f"{model} has no previous version to roll back to", mend="promote a version by name")
        entry = AuditEntry(
            time=time.time(),
            model=model,
            action="rollback",
            state="intended",
            who=who,
            from_version=champion,
            to_version=previous,
            why=why,
        )
        _append(home, entry)
        registry.set_alias(model, CHAMPION, previous)
        registry.delete_alias(model, PREVIOUS)
        _append(home, entry.model_copy(update={"state": "done", "time": time.time()}))
        return Promotion(model=model, version=previous, displaced=champion, changed=True)


def audit_log(home: Path, model: str) -> tuple[AuditEntry, ...]:
    """Every entry of a model, oldest first; a line torn by a crash at the very end is left out."""
    path = _audit_path(home)
    if not path.exists():
        return ()
    lines = path.read_text(encoding="utf-8").split("\n")
    # what follows the last newline was never finished
    entries = (AuditEntry.model_validate(json.loads(line)) for line in lines[:-1] if line)
    return tuple(entry for entry in entries if entry.model == model)


def moved_by_us(home: Path, model: str, version: str) -> bool:
    """Whether the audit log's last move of this model was to `version`."""
    entries = audit_log(home, model)
    return bool(entries) and entries[-1].to_version == version


def _clear_challenger(registry: AliasRegistry, model: str, version: str) -> None:
    if registry.get_alias(model, CHALLENGER) == version:
        registry.delete_alias(model, CHALLENGER)


def _append(home: Path, entry: AuditEntry) -> None:
    path = _audit_path(home)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # other models append here too
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


@contextmanager
def _locked(home: Path, model: str) -> Iterator[None]:
    """One promotion of a model at a time; the lock dies with its holder."""
    path = home / "locks" / f"promotion-{re.sub(r'[^A-Za-z0-9._-]', '_', model)}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _named(version: str | None) -> str:
    return "none" if version is None else f"version {version}"
