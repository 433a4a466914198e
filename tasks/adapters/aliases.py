"""MLflow's registry as promotion sees it: aliases and tags of a deployment's versions.

MLflow moves an alias unconditionally, last writer wins. Compare-and-set, its lock and the audit log are those of
`speculators_core.lifecycle.promotion`, which works on this class; here each move only leaves a tag on its version, for
readers who have nothing but MLflow.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import UTC, datetime

from mlflow.exceptions import MlflowException

from speculators_core.errors import RegistryError
from tasks.adapters.redaction import redact
from tasks.adapters.tracking import Tracking, every, mlflow_errors

log = logging.getLogger(__name__)


class MlflowAliases:
    """Implements `AliasRegistry`. Every method raises RegistryError when MLflow refuses or is away."""

    def __init__(self, tracking: Tracking, *, actor: str) -> None:
        """`actor` is who moves: a Prefect flow run, or a user at the command line."""
        self._client = tracking.client
        self._uri = tracking.uri
        self._actor = actor

    def get_alias(self, model: str, alias: str) -> str | None:
        """The version that the alias names, or None: no such alias, or no such model."""
        return self.aliases(model).get(alias)

    def set_alias(self, model: str, alias: str, version: str) -> None:
        """Point the alias at a version, whatever it named before, and tag the version with when and by whom."""
        with mlflow_errors(f"move alias {alias} of {model} to version {version}", self._uri):
            self._client.set_registered_model_alias(model, alias, version)
        log.info("alias %s of %s is version %s", alias, model, version)
        stamp = datetime.now(UTC).isoformat(timespec="seconds")
        try:
            self.set_tags(model, version, {f"alias.{alias}": f"{stamp} by {self._actor}"})
        except RegistryError as error:  # the move itself stands, and the audit log has it
            log.warning("alias %s of %s was moved, but not tagged: %s", alias, model, error.what)

    def delete_alias(self, model: str, alias: str) -> None:
        """Remove the alias; nothing happens where it does not exist."""
        if self.get_alias(model, alias) is None:
            return
        with mlflow_errors(f"remove alias {alias} of {model}", self._uri):
            self._client.delete_registered_model_alias(model, alias)

    def tags(self, model: str, version: str) -> dict[str, str]:
        """Tags of a version; RegistryError where there is no such version."""
        with mlflow_errors(f"read {model} version {version}", self._uri):
            return dict(self._client.get_model_version(model, version).tags)

    def set_tags(self, model: str, version: str, tags: Mapping[str, str | None]) -> None:
        """Set tags of a version; None values are left out, secrets are masked."""
        with mlflow_errors(f"tag {model} version {version}", self._uri):
            for name, value in tags.items():
                if value is not None:
                    self._client.set_model_version_tag(model, version, name, redact(value))

    def aliases(self, model: str) -> dict[str, str]:
        """Every alias with its version; empty where there is no such model."""
        with mlflow_errors(f"read the aliases of {model}", self._uri):
            try:
                found = self._client.get_registered_model(model).aliases
            except MlflowException as error:
                if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                    return {}
                raise
        return {alias: str(version) for alias, version in found.items()}

    def versions(self, model: str) -> list[str]:
        """All version numbers, oldest first; empty where there is no such model."""
        return list(self.described(model))

    def described(self, model: str) -> dict[str, tuple[float, dict[str, str]]]:
        """Version number → (seconds since 1970 at which it was made, tags), oldest first; empty for no such model."""
        query = f"name = '{model}'"
        with mlflow_errors(f"list the versions of {model}", self._uri):
            found = every(lambda token: self._client.search_model_versions(query, page_token=token))
        found.sort(key=lambda version: int(version.version))
        return {str(v.version): (float(v.creation_timestamp or 0) / 1000, dict(v.tags)) for v in found}

    def models(self) -> list[str]:
        """Names of the registered models."""
        with mlflow_errors("list the models", self._uri):
            found = every(lambda token: self._client.search_registered_models(page_token=token))
        return sorted(model.name for model in found)
