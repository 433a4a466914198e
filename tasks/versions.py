"""Registered versions by name: promote one, take the last promotion back, tell what happened, show what is proven."""

from __future__ import annotations

import getpass
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path

from pydantic import Field

from speculators_core.errors import ConfigError, RegistryError, VerifierError
from speculators_core.lifecycle.matrix import FINGERPRINT_TAG, GATE_TAG, Matrix, build_matrix, cells, number_of
from speculators_core.lifecycle.promotion import (
    CHAMPION,
    AuditEntry,
    Promotion,
    audit_log,
    forced_by,
    settle,
    to_undo,
)
from speculators_core.lifecycle.promotion import promote as move_champion
from speculators_core.lifecycle.promotion import rollback as move_back
from speculators_core.types import StrictModel
from speculators_core.verifier.fingerprint import describe_location
from tasks.adapters.aliases import MlflowAliases
from tasks.adapters.fetched import use_fetched
from tasks.adapters.redaction import redact
from tasks.adapters.registry import DRAFT_TAG, DraftRegistry
from tasks.adapters.settings import Settings, settings
from tasks.events import DraftPromoted, DraftRolledBack
from tasks.observe import flow_run_id, tracking
from tasks.verifier_tags import REVISION_TAG, VERIFIER_TAG, template_kwargs_of

INCUMBENT_TAG = "gate.incumbent"
"""The version that the gate compared with, or `none`: what a later promotion by name must still find serving."""
EVALUATION_TAG, REPORT_TAG = "evaluation.digest", "gate.report"
APPROVAL_TAG, APPROVAL_NOTE_TAG = "gate.approval", "gate.approval.note"
NO_INCUMBENT = "none"


class Moved(StrictModel):
    """What a promotion or rollback by name did, and the pair that serves now."""

    model: str
    version: str
    displaced: str | None
    changed: bool
    noted: bool = Field(False, description="nothing moved, but that it serves by force is in the audit log now")
    verifier: str = Field(description="where the pair's verifier lies")
    verifier_fingerprint: str
    vllm: str
    seconds: float


class VersionLine(StrictModel):
    """One registered version, failed candidates included."""

    version: str
    created: str
    algorithm: str
    verifier: str
    vllm: str
    al: float | None
    outcome: str = Field(description="of the gate; `-`: it has not looked")
    reasons: str
    report: str | None = Field(description="where its report lies, as MLflow names it")
    approval: str | None = Field(description="what a person said, where the recipe asks one")
    aliases: tuple[str, ...]


class History(StrictModel):
    """Every version of a model with what the gate said, and every move of its champion, oldest first."""

    model: str
    champion: str | None = Field(description="where the alias points; the last move tells whether it serves")
    versions: tuple[VersionLine, ...]
    moves: tuple[AuditEntry, ...]

    def standing_moves(self) -> tuple[AuditEntry, ...]:
        """One entry a move: the intention of a move that was done is left out."""
        return tuple(
            move
            for move, then in zip_longest(self.moves, self.moves[1:])
            if move.state == "done"
            or then is None
            or (then.action, then.from_version, then.to_version) != (move.action, move.from_version, move.to_version)
        )


def actor() -> str:
    """Who acts: the Prefect flow run that we are in, or the user at the command line."""
    return f"prefect:{flow_run_id()}" if flow_run_id() else getpass.getuser()


def open_aliases(who: str | None = None) -> MlflowAliases:
    """The registry's aliases and tags.

    Raises:
        RegistryError: there is no registry yet, or it is away.
    """
    database = settings().sqlite_file
    if database is not None and not database.exists():
        raise RegistryError(
            f"there is no registry at {database}", mend="run `draftsmith retrain RECIPE` first, or set DRAFTSMITH_HOME"
        )
    return MlflowAliases(tracking(), actor=who or actor())


def promote_by_name(
    model: str, version: str, runtime_key: str, *, force: bool = False, why: str = "", verifier: str | None = None
) -> Moved:
    """Make a registered version the champion, without measuring anything.

    It must be proven for the verifier that its tags name, as that lies on disk now, and for the runtime of this key;
    and what serves must still be what the gate compared it with. `force` waives the gate, never the files.

    Raises:
        ConfigError: there is no such model or version.
        RegistryError: it may not serve, its files were changed, something else serves by now, MLflow is away.
        VerifierError: the pair's verifier is gone or has changed.
    """
    started = time.monotonic()
    aliases, who = open_aliases(), actor()
    tags = require_version(aliases, model, version)
    found = check_pair(tags, model, version, verifier=verifier, must_match=not force)
    fetch_draft(settings(), tags, model, version)
    expected = settle(aliases, model, runtime_key=runtime_key, home=settings().home).version
    if not force and version != expected and (seen := tags.get(INCUMBENT_TAG)) is not None:
        expected = None if seen == NO_INCUMBENT else seen
    moved = move_champion(
        aliases,
        model,
        version,
        expected=expected,
        verifier_fingerprint=found,
        runtime_key=runtime_key,
        who=who,
        why=why or "by name",
        home=settings().home,
        force=force,
    )
    announce_move(moved, why or "by name")
    return describe_move(moved, tags, started)


def rollback_model(
    model: str, *, why: str = "", check: bool = True, version: str | None = None, who: str | None = None
) -> Moved:
    """Undo the last move of the champion: the pair of verifier and draft that served before serves again.

    Args:
        version: only if this one still is the champion · who: for the audit log; None: whoever runs us.
        check: see first that the draft's files are whole, that its verifier lies unchanged where the pair has it, and
            that serving would let it in: the gate passed it on this verifier, or it was promoted by force.

    Raises:
        ConfigError: there is no such model.
        RegistryError: nothing to roll back to, it may not serve, files were changed, MLflow is away.
        VerifierError: the pair's verifier is gone or has changed.
    """
    started = time.monotonic()
    aliases = open_aliases(who)
    if not aliases.versions(model):
        raise no_such(aliases, model)

    def look(version: str, tags: Mapping[str, str]) -> None:
        if check:
            found = check_pair(tags, model, version, verifier=None, must_match=True)
            proven = any(cell.state == "proven" and cell.pair.verifier_fingerprint == found for cell in cells(tags))
            if not proven and forced_by(audit_log(settings().home, model), version) is None:
                raise RegistryError(
                    f"version {version} of {model}, which served before, may not serve: the gate has passed it on no "
                    "runtime with its verifier",
                    mend="promote another version by name (`draftsmith history MODEL` shows them)",
                )
            fetch_draft(settings(), tags, model, version)

    moved = move_back(
        aliases,
        model,
        expected=version or to_undo(aliases, model, settings().home),
        who=who or actor(),
        why=why or "by hand",
        home=settings().home,
        check=look,
    )
    announce_move(moved, why or "by hand", back=True)
    return describe_move(moved, aliases.tags(model, moved.version), started)


def history(model: str) -> History:
    """Versions, gate outcomes and moves of a model; nothing is changed.

    Raises:
        ConfigError: no such model. RegistryError: MLflow is away.
    """
    aliases = open_aliases()
    names = aliases.aliases(model)
    lines = []
    for version, (created, tags) in aliases.described(model).items():
        lines.append(
            VersionLine(
                version=version,
                created=datetime.fromtimestamp(created, UTC).isoformat(timespec="seconds"),
                algorithm=tags.get("algorithm", "-"),
                verifier=f"{tags.get('verifier.name', '-')} {tags.get(FINGERPRINT_TAG, '')[:12]}".strip(),
                vllm=tags.get("vllm.version", "-"),
                al=number_of(tags.get("al")),
                outcome=tags.get(GATE_TAG, "-"),
                reasons=tags.get("gate.reasons", ""),
                report=tags.get(REPORT_TAG),
                approval=tags.get(APPROVAL_NOTE_TAG),
                aliases=tuple(sorted(name for name, number in names.items() if number == version)),
            )
        )
    if not lines:
        raise no_such(aliases, model)
    return History(
        model=model,
        champion=names.get(CHAMPION),
        versions=tuple(lines),
        moves=audit_log(settings().home, model),
    )


def compatibility(model: str) -> Matrix:
    """The compatibility matrix of a model.

    Raises:
        ConfigError: no such model. RegistryError: MLflow is away.
    """
    aliases = open_aliases()
    versions = {version: tags for version, (_, tags) in aliases.described(model).items()}
    if not versions:
        raise no_such(aliases, model)
    return build_matrix(model, versions, aliases.aliases(model))


def require_version(aliases: MlflowAliases, model: str, version: str) -> dict[str, str]:
    """Tags of a version; ConfigError that names the versions there are."""
    versions = aliases.versions(model)
    if not versions:
        raise no_such(aliases, model)
    if version not in versions:
        raise ConfigError(f"{model} has no version {version}", mend=f"its versions: {', '.join(versions)}")
    return aliases.tags(model, version)


def no_such(aliases: MlflowAliases, model: str) -> ConfigError:
    """The error for a model that nobody registered; names those there are, or where none is."""
    what = f"no model {model!r} is registered"
    if known := aliases.models():
        return ConfigError(what, mend=f"registered models: {', '.join(known)}")
    return ConfigError(
        f"{what}: nothing is, yet, at {redact(settings().tracking_uri)}",
        mend="run `draftsmith retrain RECIPE`, or set MLFLOW_TRACKING_URI to where the drafts are registered",
    )


def check_pair(tags: Mapping[str, str], model: str, version: str, *, verifier: str | None, must_match: bool) -> str:
    """Fingerprint of the version's verifier as it is now: a directory, a hub id at its revision, or a URL.

    Raises:
        RegistryError: the version names no verifier.
        VerifierError: it is gone; or, with must_match, it is none that the version was measured on.
    """
    where = verifier or tags.get(VERIFIER_TAG)
    if where is None:
        raise RegistryError(
            f"version {version} of {model} does not say where its verifier lies", mend="name it with --verifier"
        )
    try:
        found = describe_location(
            where,
            revision=None if verifier else tags.get(REVISION_TAG),
            home=settings().home,
            template_kwargs=template_kwargs_of(tags, model, version),
        ).fingerprint.digest
    except VerifierError as error:
        raise VerifierError(
            f"the verifier of {model} version {version} cannot be used: {error.what}",
            mend="put it back, or name where it lies now with --verifier",
        ) from error
    if must_match and found not in {cell.pair.verifier_fingerprint for cell in cells(tags)}:
        raise VerifierError(
            f"the verifier at {where} is not the one of {model} version {version} "
            f"({found[:12]} instead of {tags.get(FINGERPRINT_TAG, 'none')[:12]})",
            mend="test the version on it first (`draftsmith matrix MODEL --test VERSION --recipe RECIPE`), or retrain",
        )
    return found


def fetch_draft(settings: Settings, tags: Mapping[str, str], model: str, version: str) -> tuple[Path, str]:
    """A version's draft under the state root, verified file by file, and its digest; in use until this process ends.

    Raises:
        RegistryError: it was not registered by draftsmith, its files were changed, or MLflow is away.
    """
    digest = tags.get(DRAFT_TAG)
    if digest is None:
        raise RegistryError(f"{model} version {version} was not registered by draftsmith: it has no digest")
    return DraftRegistry(tracking()).download(model, version, use_fetched(settings, digest)), digest


def announce_move(moved: Promotion, why: str, *, back: bool = False) -> None:
    """Tell that the champion was moved, if it was."""
    if moved.changed:
        kind = DraftRolledBack if back else DraftPromoted
        told = kind(deployment=moved.model, version=moved.version, displaced=moved.displaced, reasons=(why,))
        told.emit(f"move at {time.time_ns()}")


def describe_move(moved: Promotion, tags: Mapping[str, str], started: float) -> Moved:
    """A move with the pair that it made serve."""
    return Moved(
        **moved.model_dump(),
        verifier=tags.get(VERIFIER_TAG, "-"),
        verifier_fingerprint=tags.get(FINGERPRINT_TAG, "-"),
        vllm=tags.get("vllm.version", "-"),
        seconds=round(time.monotonic() - started, 2),
    )
