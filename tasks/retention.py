"""Retention over the real store and registry: what is referred to, what may go, and the deletion itself."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from pydantic import Field, TypeAdapter, ValidationError

from speculators_core.errors import ConfigError, RegistryError, StoreError
from speculators_core.lifecycle.matrix import cells
from speculators_core.lifecycle.plan import MADE_OF, MadeOf
from speculators_core.lifecycle.promotion import CHAMPION, audit_log, served_by
from speculators_core.lifecycle.retention import Item, Line, Plan, Root, plan_sweep
from speculators_core.locks import named_lock
from speculators_core.stages.states import RECORDS
from speculators_core.store import Store, write_atomic
from speculators_core.store.files import discard
from speculators_core.types import ArtifactRef, StrictModel
from tasks.adapters.aliases import MlflowAliases
from tasks.adapters.fetched import FETCHED, sole_user
from tasks.adapters.redaction import redact
from tasks.adapters.registry import DRAFT_TAG
from tasks.adapters.settings import Settings, settings
from tasks.observe import tracking
from tasks.versions import EVALUATION_TAG

log = logging.getLogger(__name__)


class Pin(StrictModel):
    """An artifact that somebody wants kept."""

    name: str = Field(description="kind/input digest")
    digest: str
    why: str
    when: str


_PINS = TypeAdapter(tuple[Pin, ...])


_LOOK_AGAIN_S = 5.0
"""For how long a sweep believes what it saw of registry and store."""


class Swept(StrictModel):
    """What a sweep did: its plan, and what of it was left because by then somebody used it, or wanted it kept."""

    plan: Plan
    deleted: tuple[str, ...]
    left: tuple[str, ...]


def open_store(found: Settings) -> Store:
    """The artifact store of the settings."""
    return Store(found.store, scratch=found.home / "scratch")


def plan_gc(*, keep_days: float, quota_bytes: int | None = None) -> Plan:
    """What a sweep would delete now; looks only.

    Raises:
        RegistryError: MLflow is away: without its word nothing is known to be unreferenced.
    """
    store = open_store(settings())
    items = tuple(list_items(store))
    return plan_sweep(items, list_roots(store, items), now=time.time(), keep_days=keep_days, quota_bytes=quota_bytes)


def collect(*, keep_days: float, quota_bytes: int | None = None) -> Swept:
    """Plan and delete, one sweep at a time.

    Each artifact goes out of sight by one rename before its files are deleted; what a killed sweep left half deleted
    is deleted by the next. Who begins to use an artifact meanwhile, registers, promotes or pins it, keeps it: the list
    of pins is read again before every deletion, and everything else every few seconds. It works on a full disk.

    Raises:
        RegistryError: MLflow is away, from the beginning or by now; what was deleted until then is in the log.
    """
    with named_lock(settings().locks, "gc", even_full=True):
        store = open_store(settings())
        store.empty_trash()
        shutil.rmtree(_trash(), ignore_errors=True)
        plan = plan_gc(keep_days=keep_days, quota_bytes=quota_bytes)
        going, looked = {(line.name, line.digest) for line in plan.deletions}, time.monotonic()
        deleted: list[str] = []
        left: list[str] = []
        for line in plan.deletions:
            if time.monotonic() - looked > _LOOK_AGAIN_S:
                again = plan_gc(keep_days=keep_days, quota_bytes=quota_bytes)
                going, looked = {(line.name, line.digest) for line in again.deletions}, time.monotonic()
            with named_lock(settings().locks, "pins", even_full=True):
                pins = read_pins(settings().home)
                pinned = any(line.name == pin.name or line.digest == pin.digest for pin in pins)
                gone = not pinned and (line.name, line.digest) in going and _delete(store, line)
            (deleted if gone else left).append(line.name)
            log.info("gc %s %s", "deleted" if gone else "left", line.name)
    return Swept(plan=plan, deleted=tuple(deleted), left=tuple(left))


def _delete(store: Store, line: Line) -> bool:
    """Delete what a plan's line names; False, and it stays, where somebody uses it."""
    folder, *rest = line.name.split("/")
    if folder == "work":
        return store.sweep_workspace(*rest)
    path = settings().home / line.name
    if folder == FETCHED:
        with sole_user(settings(), *rest) as free:
            if free:
                discard(path, _trash())
        return free
    if folder == RECORDS:
        if free := not _stages_run(store):
            discard(path, _trash())
        return free
    return store.sweep(ArtifactRef(kind=folder, uri=f"{store.root}/{line.name}", digest=line.digest))


def list_items(store: Store) -> Iterator[Item]:
    """Artifacts with their lineage, then what killed stages left, drafts fetched from the registry, states of replies.

    Raises:
        StoreError: a manifest cannot be read: what it was made of would pass for unreferenced.
    """
    for ref in store.artifacts(whole=True):
        manifest = store.manifest(ref)
        made_of = manifest.meta.get(MADE_OF)
        yield Item(
            name=_name(ref),
            digest=ref.digest,
            num_bytes=manifest.num_bytes,
            used=store.last_used(ref),
            inputs=None if made_of is None else tuple(MadeOf.model_validate(made_of).inputs.values()),
        )
    for kind, digest, path in store.workspaces():
        yield _directory(f"work/{kind}/{digest}", path)
    for folder in (FETCHED, RECORDS):
        for path in sorted((settings().home / folder).glob("[!.]*")):
            yield _directory(f"{folder}/{path.name}", path)


def _directory(name: str, path: Path) -> Item:
    """A directory that is no artifact, made of nothing that is known; it gives its name for a digest."""
    files = [file.stat() for file in path.rglob("*") if file.is_file()]
    used = max([path.stat().st_mtime, *(stat.st_mtime for stat in files)])
    return Item(name=name, digest=name, num_bytes=sum(stat.st_size for stat in files), used=used, inputs=())


def list_roots(store: Store, items: tuple[Item, ...]) -> Iterator[Root]:
    """What must stay: in use just now, registered, pinned."""
    for item in items:
        if _in_use(store, item):
            yield Root(digest=item.digest, reason="in use just now", lineage=True)
    yield from registered_roots(settings())
    for pin in read_pins(settings().home):
        yield Root(digest=pin.digest, reason=f"pinned: {pin.why or 'no reason given'}")


def _in_use(store: Store, item: Item) -> bool:
    kind, digest = item.name.split("/")[-2:]
    if kind == RECORDS:
        return _stages_run(store)
    if kind != FETCHED:
        return store.busy(kind, digest)
    with sole_user(settings(), digest, create=False) as free:
        return not free


def _stages_run(store: Store) -> bool:
    """Whether any stage is making something: it may read the states that came with its replies."""
    return any(store.busy(kind, digest) for kind, digest, _ in store.workspaces())


def registered_roots(found: Settings) -> list[Root]:
    """What MLflow's registered versions refer to; nothing where the state root's own registry has none yet.

    Raises:
        RegistryError: MLflow is away. Or nothing is registered there, and something may be elsewhere: the store is
            not the state root's alone, or a draft was fetched from a registry.
    """
    database = found.sqlite_file
    missing = database is not None and not database.exists()
    roots = [] if missing else list(_roots_of_versions(found))
    if not roots and (not found.self_contained or any((found.home / FETCHED).glob("[!.]*"))):
        uri = redact(found.tracking_uri)
        what = f"there is no registry at {uri}" if missing else f"nothing is registered at {uri}"
        raise RegistryError(
            f"{what}: nothing of the store {redact(found.store)} is known to be unreferenced",
            mend="set MLFLOW_TRACKING_URI and DRAFTSMITH_HOME as they are where its drafts are registered",
        )
    return roots


def _roots_of_versions(found: Settings) -> Iterator[Root]:
    aliases = MlflowAliases(tracking(), actor="gc")
    for model in aliases.models():
        names = aliases.aliases(model)
        serving = served_by(audit_log(found.home, model))
        for version, (_, tags) in aliases.described(model).items():
            held = sorted(name for name, number in names.items() if number == version)
            if version == serving and CHAMPION not in held:  # other hands moved that, and it was not followed
                held.insert(0, "serves")
            reason = f"{', '.join(held) or 'registered'}: {model} version {version}"
            evaluations = [cell.evaluation for cell in cells(tags)]
            for digest in (tags.get(DRAFT_TAG), tags.get(EVALUATION_TAG), *evaluations):
                if digest:
                    yield Root(digest=digest, reason=reason, lineage=bool(held))
            if held:  # serving reads it there; that of any other version can be fetched again
                yield Root(digest=f"{FETCHED}/{tags.get(DRAFT_TAG)}", reason=reason)


def pin(reference: str, *, why: str = "") -> Pin:
    """Keep an artifact until it is unpinned.

    Raises:
        ConfigError: the reference names no artifact, or several.
    """
    with named_lock(settings().locks, "pins"):  # gc deletes nothing meanwhile: what is confirmed is there
        ref = resolve(open_store(settings()), reference)
        added = Pin(name=_name(ref), digest=ref.digest, why=why, when=datetime.now(UTC).isoformat(timespec="seconds"))
        others = [one for one in read_pins(settings().home) if one.digest != added.digest]
        _write_pins(settings().home, [*others, added])
    return added


def unpin(reference: str) -> Pin:
    """Let an artifact go again.

    Raises:
        ConfigError: nothing of that name is pinned.
    """
    with named_lock(settings().locks, "pins"):
        pins = read_pins(settings().home)
        found = [one for one in pins if one.name.startswith(reference) or one.digest.startswith(reference)]
        if len(found) != 1:
            known = ", ".join(one.name for one in pins) or "none"
            raise ConfigError(f"{reference} names {len(found) or 'no'} pinned artifacts", mend=f"pinned: {known}")
        _write_pins(settings().home, [one for one in pins if one != found[0]])
    return found[0]


def read_pins(home: Path) -> tuple[Pin, ...]:
    """Everything that is pinned.

    Raises:
        StoreError: the list cannot be read: nobody knows then what may be deleted.
    """
    path = home / "pins.json"
    try:
        return _PINS.validate_json(path.read_bytes()) if path.exists() else ()
    except ValidationError as error:
        raise StoreError(
            f"the list of pinned artifacts {path} cannot be read: {error.errors()[0]['msg']}",
            mend="put it right, or delete it and pin again what shall stay",
        ) from error


def resolve(store: Store, reference: str) -> ArtifactRef:
    """The one artifact whose address, `kind/key` or digest begins with (or, for addresses, ends in) the reference.

    Raises:
        ConfigError: none, or several.
    """
    wanted = reference.rstrip("/").removesuffix("/data")
    found = [
        ref
        for ref in store.artifacts()
        if ref.uri == wanted or wanted.endswith(f"/{_name(ref)}") or _name(ref).startswith(wanted)
        or (len(wanted) >= 6 and ref.digest.startswith(wanted))
    ]  # fmt: skip
    if len(found) != 1:
        names = ", ".join(_name(ref)[:40] for ref in found[:5])
        raise ConfigError(
            f"{reference} names {len(found) or 'no'} artifacts of the store",
            mend=f"say more of it: {names}" if found else "`draftsmith gc` lists what there is",
        )
    return found[0]


def _trash() -> Path:
    return settings().home / "scratch" / "trash"


def _write_pins(home: Path, pins: list[Pin]) -> None:
    text = json.dumps([one.model_dump(mode="json") for one in pins], indent=1) + "\n"
    write_atomic(home / "pins.json", lambda part: part.write_text(text))


def _name(ref: ArtifactRef) -> str:
    return "/".join(ref.uri.rstrip("/").split("/")[-2:])
