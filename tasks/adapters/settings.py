"""Every environment variable that draftsmith reads or sets, in one place.

`apply_environment()` runs when the package `tasks` is imported, before Prefect and MLflow are: they read the
environment once. It only fills in what is unset, so whatever the user set stays.

    DRAFTSMITH_HOME        state root                                default .draftsmith
    DRAFTSMITH_STORE       artifact store, a path or an fsspec URL   default <home>/store
    MLFLOW_TRACKING_URI    MLflow's server or store                  default sqlite:///<home>/mlflow.db
    MLFLOW_EXPERIMENT_NAME experiment of the runs                    default draftsmith
    PREFECT_HOME           Prefect's state                           default <home>/prefect, never ~/.prefect
    PREFECT_API_URL        a Prefect server that somebody runs       default none: a private one for each command
    DRAFTSMITH_SITE        the installation's file                   default deployments/site.yaml, where that exists
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from functools import cache
from pathlib import Path
from urllib.parse import unquote

from pydantic import Field

from speculators_core.store.files import may_not_write
from speculators_core.types import StrictModel

DEFAULT_HOME = ".draftsmith"

_FIXED_DEFAULTS = {
    "DO_NOT_TRACK": "true",  # honoured by both Prefect ("1", "true") and MLflow ("true" only)
    # Prefect: nothing pickled, nothing sent out, and a first start with migrations takes its time on a small machine
    "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_CLOUD_ENABLE_ORCHESTRATION_TELEMETRY": "false",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    "PREFECT_LOGGING_EXTRA_LOGGERS": "speculators_core,tasks",  # the library's log lines show in Prefect's UI
    # MLflow: an absent server is reported after seconds, a hanging one after a minute and a half
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "GIT_PYTHON_REFRESH": "quiet",
}


class Settings(StrictModel):
    """What the environment says, resolved once."""

    home: Path = Field(description="state root, absolute")
    store: str = Field(description="root of the artifact store: an absolute path or an fsspec URL")
    tracking_uri: str = Field(description="MLflow tracking and registry store")
    experiment: str = Field(description="MLflow experiment that holds the runs")
    prefect_home: Path = Field(description="Prefect's own directory")
    prefect_api_url: str | None = Field(description="a running Prefect server; None: start a private one")
    site: Path = Field(description="the installation's file: pools, watched recipes, who is told")

    @property
    def locks(self) -> Path:
        """Directory of the lock files."""
        return self.home / "locks"

    @property
    def mlflow_artifacts(self) -> Path:
        """Where artifacts lie when MLflow's store is our own SQLite file."""
        return self.home / "mlartifacts"

    @property
    def sqlite_file(self) -> Path | None:
        """The SQLite file behind `tracking_uri`, or None when MLflow is elsewhere, or in memory.

        Read as SQLAlchemy reads it: what follows `?` are options, and a relative path begins in the working directory.
        """
        scheme, _, rest = self.tracking_uri.partition(":///")
        path = unquote(rest.partition("?")[0]).removeprefix("file:")
        known = scheme.partition("+")[0] == "sqlite" and path not in ("", ":memory:")
        return Path(path).absolute() if known else None

    @property
    def self_contained(self) -> bool:
        """Whether registry and store both lie in the state root: then nothing was registered anywhere else."""
        own_registry = self.sqlite_file == self.home / "mlflow.db"
        return own_registry and Path(self.store).resolve().is_relative_to(self.home.resolve())


def read_settings(environ: Mapping[str, str]) -> Settings:
    """Settings from a mapping of environment variables; empty values count as unset."""

    def value(name: str) -> str | None:
        return environ.get(name) or None

    home = Path(value("DRAFTSMITH_HOME") or DEFAULT_HOME).expanduser().absolute()
    store = value("DRAFTSMITH_STORE") or str(home / "store")
    return Settings(
        home=home,
        store=store if "://" in store else str(Path(store).expanduser().absolute()),
        tracking_uri=value("MLFLOW_TRACKING_URI") or f"sqlite:///{home / 'mlflow.db'}",
        experiment=value("MLFLOW_EXPERIMENT_NAME") or "draftsmith",
        prefect_home=Path(value("PREFECT_HOME") or home / "prefect").expanduser().absolute(),
        prefect_api_url=value("PREFECT_API_URL"),
        site=Path(value("DRAFTSMITH_SITE") or "deployments/site.yaml").absolute(),
    )


def apply_environment(environ: MutableMapping[str, str] = os.environ) -> Settings:
    """Fill in what Prefect and MLflow read from the environment, and make the directories that they need, if we may."""
    found = read_settings(environ)
    for name, default in {**_FIXED_DEFAULTS, "PREFECT_HOME": str(found.prefect_home)}.items():
        if not environ.get(name):
            environ[name] = default
    environ["DRAFTSMITH_HOME"] = str(found.home)  # absolute: child processes may have another working directory
    for directory in (found.home, found.prefect_home):
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if not may_not_write(error):  # there, commands that only read do without
                raise
    return found


@cache
def settings() -> Settings:
    """The process's settings, read at the first call."""
    return apply_environment()
