"""Aliases of a deployment's registered model (champion, challenger, previous), moved as compare-and-set.

MLflow's own alias update is last-writer-wins. Every move of ours happens under an flock, compares the alias with what
the mover last saw, and leaves an audit line (JSON) and a tag. An alias that was moved by other hands is visible as a
champion whose newest audit line names another version.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime

from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from speculators_core.errors import RegistryError
from speculators_core.types import StrictModel
from tasks.adapters.locks import file_lock
from tasks.adapters.redaction import redact
from tasks.adapters.tracking import Tracking, mlflow_errors

log = logging.getLogger(__name__)

CHAMPION = "champion"
CHALLENGER = "challenger"
PREVIOUS = "previous"


class AliasMove(StrictModel):
    """One move as the audit log keeps it; `before` or `after` None: the alias was not set, or was removed."""

    time: str
    model: str
    alias: str
    before: str | None
    after: str | None
    actor: str
    reason: str
    forced: bool = False


class MlflowAliases:
    """The alias registry that promotion works on."""

    def __init__(self, tracking: Tracking, *, actor: str = "draftsmith") -> None:
        """`actor` is who moves: a Prefect flow run, or a user on the command line."""
        self._client = tracking.client
        self._uri = tracking.uri
        self._settings = tracking.settings
        self._actor = actor
        self._local = threading.local()

    def get_alias(self, model: str, alias: str) -> str | None:
        """The version that the alias points at, or None: no such alias, or no such model."""
        with mlflow_errors(f"read alias {alias} of {model}", self._uri):
            try:
                return str(self._client.get_model_version_by_alias(model, alias).version)
            except MlflowException as error:
                # INVALID_PARAMETER_VALUE is what the SQL store says for an alias that isn't set
                if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                    return None
                raise

    def set_alias(self, model: str, alias: str, version: str, *, reason: str = "", forced: bool = False) -> None:
        """Point the alias at a version, with an audit line; inside `transaction` for a move that depends on a read."""
        with self._held(model):
            before = self.get_alias(model, alias)
            if before == version:
                return
            with mlflow_errors(f"move alias {alias} of {model}", self._uri):
                self._client.set_registered_model_alias(model, alias, version)
            self._record(model, alias, before, version, reason, forced)

    def delete_alias(self, model: str, alias: str, *, reason: str = "") -> None:
        """Remove the alias, with an audit line; nothing happens when it isn't set."""
        with self._held(model):
            before = self.get_alias(model, alias)
            if before is None:
                return
            with mlflow_errors(f"remove alias {alias} of {model}", self._uri):
                self._client.delete_registered_model_alias(model, alias)
            self._record(model, alias, before, None, reason, forced=False)

    def compare_and_set(
        self, model: str, alias: str, *, expected: str | None, version: str, reason: str, forced: bool = False
    ) -> bool:
        """Move the alias only when it still points at `expected` (None: at nothing); False when it doesn't."""
        with self._held(model):
            if self.get_alias(model, alias) != expected:
                return False
            self.set_alias(model, alias, version, reason=reason, forced=forced)
            return True

    @contextmanager
    def transaction(self, model: str) -> Iterator[None]:
        """Exclusive right to move this model's aliases, among the processes that share the state root."""
        with self._held(model):
            yield

    def version_tags(self, model: str, version: str) -> dict[str, str]:
        """All tags of a version; RegistryError when there is no such version."""
        return dict(self._version(model, version).tags)

    def set_tags(self, model: str, version: str, tags: Mapping[str, str | None]) -> None:
        """Set tags of a version; None values are left out."""
        with mlflow_errors(f"tag {model} version {version}", self._uri):
            for name, value in tags.items():
                if value is not None:
                    self._client.set_model_version_tag(model, version, name, redact(value))

    def versions(self, model: str) -> list[str]:
        """All version numbers, oldest first; empty where there is no such model."""
        with mlflow_errors(f"list versions of {model}", self._uri):
            found = self._client.search_model_versions(f"name = '{model}'")
        return sorted((str(version.version) for version in found), key=int)

    def aliases(self, model: str) -> dict[str, str]:
        """Every alias with its version; empty where there is no such model."""
        with mlflow_errors(f"read {model}", self._uri):
            try:
                found = self._client.get_registered_model(model).aliases
            except MlflowException as error:
                if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                    return {}
                raise
        return {alias: str(version) for alias, version in found.items()}

    def history(self, model: str) -> list[AliasMove]:
        """Our own moves of this model's aliases, oldest first."""
        try:
            lines = self._settings.audit_log.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return []
        moves = [AliasMove.model_validate_json(line) for line in lines if line]
        return [move for move in moves if move.model == model]

    def moved_by_others(self, model: str, alias: str) -> bool:
        """Whether the alias points elsewhere than our last move left it (somebody used MLflow's UI)."""
        ours = [move.after for move in self.history(model) if move.alias == alias]
        return self.get_alias(model, alias) != (ours[-1] if ours else None)

    def _version(self, model: str, version: str) -> ModelVersion:
        with mlflow_errors(f"read {model} version {version}", self._uri):
            return self._client.get_model_version(model, version)

    @contextmanager
    def _held(self, model: str) -> Iterator[None]:
        held: set[str] = self._local.__dict__.setdefault("held", set())
        if model in held:  # inside this thread's own transaction
            yield
            return
        with file_lock(self._settings.locks, f"aliases-{model}"):
            held.add(model)
            try:
                yield
            finally:
                held.discard(model)

    def _record(
        self, model: str, alias: str, before: str | None, after: str | None, reason: str, forced: bool
    ) -> None:
        """Append the audit line (one write, synced) and tag the version: for readers who have only MLflow."""
        move = AliasMove(
            time=datetime.now(UTC).isoformat(timespec="seconds"),
            model=model,
            alias=alias,
            before=before,
            after=after,
            actor=self._actor,
            reason=redact(reason),
            forced=forced,
        )
        path = self._settings.audit_log
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, (json.dumps(move.model_dump(mode="json")) + "\n").encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        log.info("alias %s of %s: %s -> %s (%s)", alias, model, before, after, reason)
        tagged = after or before
        if tagged is None:
            return
        try:
            self.set_tags(model, tagged, {f"alias.{alias}": json.dumps(move.model_dump(mode="json"))})
        except RegistryError as error:
            log.warning("alias %s of %s was moved, but the tag is missing: %s", alias, model, error.what)
