"""A quick look at MLflow's model registry: aliases and tags, without importing MLflow (about 3 s).

For commands that must answer at once. It reads the registry itself, never a copy: a local SQLite store through three of
its tables, read-only; a server through its REST API. Whatever else MLflow is pointed at, and a database whose tables
are not those of the pinned version, is asked through MLflow's own client. Writing is the client's business alone.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from pathlib import Path
from typing import Any

from pydantic import Field

from speculators_core.errors import RegistryError
from speculators_core.types import StrictModel
from tasks.adapters.deadline import within
from tasks.adapters.redaction import redact
from tasks.adapters.settings import Settings

log = logging.getLogger(__name__)

_TIMEOUT_S = 10.0
_LIMIT_S = 60.0
_MEND = "check that MLFLOW_TRACKING_URI is right and its server is up, then run the command again"


class ModelView(StrictModel):
    """What the registry says of one deployment's model at one moment."""

    model: str
    aliases: dict[str, str] = Field(description="alias -> version")
    tags: dict[str, dict[str, str]] = Field(description="version -> its tags")

    def version_of(self, alias: str) -> str | None:
        """The version that an alias names, where both exist."""
        version = self.aliases.get(alias)
        return version if version in self.tags else None


def look(settings: Settings, model: str) -> ModelView:
    """Aliases and versions of a registered model; an empty view where there is no such model, or no registry yet.

    Raises:
        RegistryError: MLflow is away or refuses.
    """
    database = settings.sqlite_file
    if database is not None:
        if not database.exists():
            return ModelView(model=model, aliases={}, tags={})
        try:
            return _from_sqlite(database, model)
        except sqlite3.Error as error:
            log.info("%s is read through MLflow's own client: %s", database, error)
    elif settings.tracking_uri.startswith(("http://", "https://")):
        uri = settings.tracking_uri.rstrip("/")
        try:
            return within(_LIMIT_S, lambda: _from_server(uri, model))
        except TimeoutError as error:
            raise RegistryError(f"MLflow at {redact(uri)} failed to show {model}: {error}", mend=_MEND) from error
    return _from_client(settings, model)


def _from_sqlite(database: Path, model: str) -> ModelView:
    # the default workspace: what a client that names none works in
    of_model = "WHERE name = ? AND workspace = 'default'"
    connection = sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True, timeout=_TIMEOUT_S)
    try:
        connection.execute("BEGIN")  # one moment for all three
        aliases = dict(connection.execute(f"SELECT alias, version FROM registered_model_aliases {of_model}", (model,)))
        alive = f"SELECT version FROM model_versions {of_model} AND current_stage IS NOT 'Deleted_Internal'"
        tags: dict[str, dict[str, str]] = {str(version): {} for (version,) in connection.execute(alive, (model,))}
        for version, key, value in connection.execute(
            f"SELECT version, key, value FROM model_version_tags {of_model}", (model,)
        ):
            if str(version) in tags:
                tags[str(version)][key] = value
    finally:
        connection.close()
    return ModelView(model=model, aliases={name: str(number) for name, number in aliases.items()}, tags=tags)


def _from_server(uri: str, model: str) -> ModelView:
    import httpx

    user, password = os.environ.get("MLFLOW_TRACKING_USERNAME"), os.environ.get("MLFLOW_TRACKING_PASSWORD")
    headers = {"Authorization": f"Bearer {token}"} if (token := os.environ.get("MLFLOW_TRACKING_TOKEN")) else {}
    try:
        with httpx.Client(
            base_url=f"{uri}/api/2.0/mlflow/",
            auth=(user, password or "") if user else None,
            headers=headers,
            timeout=_TIMEOUT_S,
        ) as client:
            answer = client.get("registered-models/get", params={"name": model})
            if answer.status_code == 404:
                return ModelView(model=model, aliases={}, tags={})
            answer.raise_for_status()
            aliases = answer.json()["registered_model"].get("aliases", [])
            tags: dict[str, dict[str, str]] = {}
            page: dict[str, Any] = {}
            while True:
                query = {"filter": f"name = '{model}'", "max_results": 1000, **page}
                found = client.get("model-versions/search", params=query).raise_for_status().json()
                for version in found.get("model_versions", []):
                    tags[str(version["version"])] = {tag["key"]: tag["value"] for tag in version.get("tags", [])}
                if not found.get("next_page_token"):
                    break
                page = {"page_token": found["next_page_token"]}
    except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError) as error:
        known = isinstance(error, httpx.HTTPError)
        reason = redact(str(error) or type(error).__name__)[:300] if known else "it does not answer as MLflow does"
        raise RegistryError(f"MLflow at {redact(uri)} failed to show {model}: {reason}", mend=_MEND) from error
    return ModelView(model=model, aliases={item["alias"]: str(item["version"]) for item in aliases}, tags=tags)


def _from_client(settings: Settings, model: str) -> ModelView:
    from tasks.adapters.aliases import MlflowAliases
    from tasks.adapters.tracking import Tracking

    registry = MlflowAliases(Tracking(settings), actor="look")
    tags = {version: dict(registry.tags(model, version)) for version in registry.versions(model)}
    return ModelView(model=model, aliases=registry.aliases(model), tags=tags)
