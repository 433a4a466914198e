"""MLflow runs: one parent for a recipe, one child for each attempt at a stage.

    parent  found by the recipe's digest and reopened, so that a resumed pipeline goes on in the same place
    child   a new one for every attempt; a child whose process died is marked KILLED when the parent is reopened

Nothing here decides what a stage does. Secrets are masked on the way, conversation text is withheld unless the recipe
allows it, and an MLflow that is away becomes a RegistryError within a bounded time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import mlflow
import psutil
from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException
from mlflow.store.entities import PagedList

from speculators_core.errors import DraftsmithError, RegistryError
from speculators_core.locks import named_lock
from speculators_core.types import StrictModel
from tasks.adapters.redaction import redact, scrub, scrubbed_file
from tasks.adapters.settings import Settings
from tasks.adapters.transport import limit_requests

log = logging.getLogger(__name__)

T = TypeVar("T")

RECIPE_TAG = "draftsmith.recipe_digest"
STAGE_TAG = "draftsmith.stage"
ATTEMPT_TAG = "draftsmith.attempt"
OWNER_TAG = "draftsmith.owner"
PARENT_TAG = "mlflow.parentRunId"
MAX_METRICS = 1000  # of one request: MLflow's limit
MAX_PARAM_CHARACTERS = 250  # longer values go to an artifact, where nothing truncates them
_DIGEST_CHARACTERS = 36  # width of MLflow's column; the whole digest is kept as a tag of the input


class DatasetFacts(StrictModel):
    """An input of a stage: what it was, not its data."""

    name: str
    digest: str
    context: str
    uri: str
    kind: str


def flat_params(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested configuration as dotted names; sequences stay whole."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat.update(flat_params(value, f"{name}."))
        else:
            flat[name] = value
    return flat


def metric_name(name: str) -> str:
    """The name with what MLflow refuses replaced by underscores."""
    return re.sub(r"[^\w\-./: ]", "_", name)[:250]


def every(fetch: Callable[[str | None], PagedList[T]]) -> list[T]:
    """All of what MLflow lists in pages; `fetch` gets a page by its token, the first by None."""
    page = fetch(None)
    found = list(page)
    while page.token:
        page = fetch(page.token)
        found += page
    return found


@contextmanager
def mlflow_errors(action: str, uri: str, *, mend: str | None = None) -> Iterator[None]:
    """Turn MLflow's, its database's and its transport's errors into a RegistryError that names the action.

    Inside it, what MLflow itself looks up at the address of the process (`models:/…`) is looked up at this one.
    """
    try:
        mlflow.set_tracking_uri(uri)
        mlflow.set_registry_uri(uri)
        yield
    except Exception as error:
        if not _is_mlflow_trouble(error):
            raise
        reason = redact(str(error).splitlines()[0] if str(error) else repr(error))[:400]
        raise RegistryError(
            f"MLflow at {redact(uri)} failed to {action}: {reason}",
            mend=mend or "check that MLFLOW_TRACKING_URI is right and its server is up, then run the command again",
        ) from error


def _is_mlflow_trouble(error: Exception) -> bool:
    """What MLflow raises itself, and what escapes from its transport (requests), its database or the disk."""
    if isinstance(error, (MlflowException, OSError)):  # requests' errors are OSErrors
        return True
    return type(error).__module__.split(".")[0] in ("sqlalchemy", "sqlite3", "requests", "urllib3")


@dataclass(frozen=True)
class StageRun:
    """A child run that is open for writing."""

    client: MlflowClient
    uri: str
    run_id: str
    allow_text: bool

    def params(self, values: Mapping[str, Any]) -> None:
        """Log nested settings as dotted parameters; values over 250 characters go to artifacts `params/<name>.json`."""
        short: list[Param] = []
        for name, value in flat_params(scrub(dict(values), allow_text=self.allow_text)).items():
            text = value if isinstance(value, str) else json.dumps(value)
            if len(text) > MAX_PARAM_CHARACTERS:
                self.json(f"params/{name}.json", value)
                text = f"see artifact params/{name}.json"
            short.append(Param(name, text))
        with mlflow_errors("log parameters", self.uri):
            for start in range(0, len(short), 100):
                self.client.log_batch(self.run_id, params=short[start : start + 100])

    def metrics(self, values: Mapping[str, float], *, step: int = 0) -> None:
        """Log numbers at a step, stamped with the present time."""
        now = int(time.time() * 1000)
        self.metric_points([Metric(metric_name(name), float(value), now, step) for name, value in values.items()])

    def metric_points(self, points: Sequence[Metric]) -> None:
        """Log finished metric points in requests of at most 1,000; a point that is already there is not doubled."""
        with mlflow_errors("log metrics", self.uri):
            for start in range(0, len(points), MAX_METRICS):
                self.client.log_batch(self.run_id, metrics=points[start : start + MAX_METRICS])

    def tags(self, values: Mapping[str, str | None]) -> None:
        """Set tags; None values are left out, and text is redacted."""
        tags = [RunTag(name, redact(value)) for name, value in values.items() if value is not None]
        with mlflow_errors("set tags", self.uri):
            self.client.log_batch(self.run_id, tags=tags)

    def inputs(self, datasets: Sequence[DatasetFacts]) -> None:
        """Record what went in as datasets with digests: name, digest, kind and address, never the data."""
        entries = [
            DatasetInput(
                Dataset(
                    name=facts.name,
                    digest=facts.digest[:_DIGEST_CHARACTERS],
                    source_type="draftsmith",
                    source=json.dumps({"uri": redact(facts.uri), "kind": facts.kind, "digest": facts.digest}),
                ),
                [InputTag("mlflow.data.context", facts.context), InputTag("digest", facts.digest)],
            )
            for facts in datasets
        ]
        with mlflow_errors("record inputs", self.uri):
            self.client.log_inputs(self.run_id, entries)

    def json(self, artifact: str, value: Any) -> None:
        """Store a JSON document under this artifact path, scrubbed."""
        text = json.dumps(scrub(value, allow_text=self.allow_text), indent=1)
        with mlflow_errors(f"store {artifact}", self.uri):
            self.client.log_text(self.run_id, text, artifact)

    def text(self, artifact: str, text: str) -> None:
        """Store a text (Markdown, a log's tail) under this artifact path, with secrets masked."""
        with mlflow_errors(f"store {artifact}", self.uri):
            self.client.log_text(self.run_id, redact(text), artifact)

    def files(self, path: Path, artifact_path: str | None = None) -> None:
        """Store a file, or a directory's content, with symlinks resolved; JSON and text are scrubbed on the way.

        MLflow walks directories without following links and drops what lies behind them: real files are staged first.
        """
        with tempfile.TemporaryDirectory(prefix="draftsmith-upload-") as staging:
            stage_files(path, Path(staging), allow_text=self.allow_text)
            with mlflow_errors(f"store {path.name}", self.uri):
                self.client.log_artifacts(self.run_id, staging, artifact_path)


def stage_files(source: Path, target: Path, *, allow_text: bool | None) -> None:
    """Lay real files under `target`: links followed, binaries hard-linked or linked by name, JSON and text scrubbed.

    allow_text None: byte for byte (a draft, whose digest must not change).

    Raises:
        RegistryError: a link that leads nowhere, or in a circle.
    """
    entries = [source] if source.is_file() else sorted(source.iterdir())
    for entry in entries:
        _stage_entry(entry, target / entry.name, allow_text, ancestors=(source.resolve(),))


def _stage_entry(entry: Path, target: Path, allow_text: bool | None, ancestors: tuple[Path, ...]) -> None:
    try:
        real = entry.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise RegistryError(f"cannot upload {entry}: its link leads nowhere", mend="remove the link") from error
    if real.is_dir():
        if real in ancestors:
            raise RegistryError(f"cannot upload {entry}: its link leads in a circle", mend="remove the link")
        target.mkdir(parents=True)
        for child in sorted(real.iterdir()):
            _stage_entry(child, target / child.name, allow_text, (*ancestors, real))
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    content = None if allow_text is None else scrubbed_file(real, allow_text=allow_text)
    if content is None:
        target.symlink_to(real)  # MLflow follows links to files; only links to directories are dropped
    else:
        target.write_bytes(content)


def _sole_maker(settings: Settings) -> AbstractContextManager[None]:
    """Processes that make a fresh database's tables at the same time break each other; a server makes its own."""
    if settings.tracking_uri.startswith(("http://", "https://")):
        return nullcontext()
    address = hashlib.sha256(settings.tracking_uri.encode()).hexdigest()[:12]  # it may hold a password
    return named_lock(settings.locks, f"mlflow-init-{address}", even_full=True)


class Tracking:
    """This process's way into MLflow: opens the store once, and hands out runs."""

    def __init__(self, settings: Settings) -> None:
        """Open the store, and make it and the experiment when they are not there yet.

        Raises:
            RegistryError: MLflow is away, or its database cannot be opened.
        """
        self.settings = settings
        self.uri = settings.tracking_uri
        limit_requests()
        with _sole_maker(settings), mlflow_errors("open its store", self.uri):
            if (database := settings.sqlite_file) is not None:
                database.parent.mkdir(parents=True, exist_ok=True)
            self.client = MlflowClient(self.uri, self.uri)
            self.experiment_id = self._experiment()

    def _experiment(self) -> str:
        name = self.settings.experiment
        found = self.client.get_experiment_by_name(name)
        if found is None:
            own_store = self.settings.sqlite_file is not None
            location = self.settings.mlflow_artifacts.as_uri() if own_store else None
            try:
                self.client.create_experiment(name, artifact_location=location)
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":  # another process was faster
                    raise
            found = self.client.get_experiment_by_name(name)
        if found is None or not found.experiment_id:
            raise RegistryError(
                f"what answers at {redact(self.uri)} does not speak as MLflow does: it knows the experiment {name!r}, "
                "but not its id",
                mend="check that MLFLOW_TRACKING_URI is the address of an MLflow server",
            )
        if found.lifecycle_stage != "active":
            raise RegistryError(
                f"MLflow's experiment {name!r} was deleted",
                mend="restore it with `mlflow experiments restore`, or set MLFLOW_EXPERIMENT_NAME",
            )
        return str(found.experiment_id)

    def open_parent(self, recipe_digest: str, *, name: str, tags: Mapping[str, str | None]) -> str:
        """The run id of this recipe's parent: found and reopened, or made.

        Children that were left RUNNING by dead processes of this host are marked KILLED.
        """
        with named_lock(self.settings.locks, f"parent-{recipe_digest}"), mlflow_errors("open the run", self.uri):
            query = f"tags.`{RECIPE_TAG}` = '{recipe_digest}'"
            found = [run for run in self._runs(query) if PARENT_TAG not in run.data.tags]
            if found:
                run_id = str(found[0].info.run_id)
                self.client.update_run(run_id, status="RUNNING")
                self._close_dead_children(run_id)
            else:
                run = self.client.create_run(self.experiment_id, tags={RECIPE_TAG: recipe_digest}, run_name=name)
                run_id = str(run.info.run_id)
        self.handle(run_id).tags(tags)
        return run_id

    def close_run(self, run_id: str, status: str) -> None:
        """End a run as FINISHED, FAILED or KILLED."""
        with mlflow_errors("close the run", self.uri):
            self.client.set_terminated(run_id, status)

    def handle(self, run_id: str, *, allow_text: bool = False) -> StageRun:
        """A run that exists already, to write to."""
        return StageRun(self.client, self.uri, run_id, allow_text)

    @contextmanager
    def stage(
        self, parent: str, name: str, *, tags: Mapping[str, str | None], allow_text: bool = False
    ) -> Iterator[StageRun]:
        """A new child run for one attempt at a stage; ends FINISHED, FAILED, or KILLED when interrupted."""
        with named_lock(self.settings.locks, f"parent-{parent}"), mlflow_errors("start the stage's run", self.uri):
            attempt = 1 + sum(run.data.tags.get(STAGE_TAG) == name for run in self._children(parent))
            run = self.client.create_run(
                self.experiment_id,
                tags={
                    PARENT_TAG: parent,
                    STAGE_TAG: name,
                    ATTEMPT_TAG: str(attempt),
                    OWNER_TAG: _owner(),
                    **{key: redact(value) for key, value in tags.items() if value is not None},
                },
                run_name=name if attempt == 1 else f"{name} (attempt {attempt})",
            )
        child = self.handle(str(run.info.run_id), allow_text=allow_text)
        try:
            yield child
        except BaseException as error:
            self._close_quietly(child, error)
            raise
        self.close_run(child.run_id, "FINISHED")

    def _close_quietly(self, child: StageRun, error: BaseException) -> None:
        """The stage's own error matters more than a registry that is away while we report it."""
        try:
            what = error.what if isinstance(error, DraftsmithError) else str(error)
            child.tags({"draftsmith.error": f"{type(error).__name__}: {what}"[:1000]})
            self.close_run(child.run_id, "FAILED" if isinstance(error, Exception) else "KILLED")
        except RegistryError as second:
            log.warning("the failed stage's run could not be closed: %s", second.what)

    def _children(self, parent: str) -> Sequence[Run]:
        return self._runs(f"tags.`{PARENT_TAG}` = '{parent}'")

    def _runs(self, query: str) -> list[Run]:
        """Runs of the experiment, the oldest first."""
        order = ["attributes.start_time ASC"]
        return every(
            lambda token: self.client.search_runs([self.experiment_id], query, order_by=order, page_token=token)
        )

    def _close_dead_children(self, parent: str) -> None:
        for child in self._children(parent):
            owner = child.data.tags.get(OWNER_TAG, "")
            if child.info.status == "RUNNING" and owner and not _owner_lives(owner):
                self.client.set_terminated(child.info.run_id, "KILLED")


def _owner() -> str:
    """host:pid:start time: enough to tell later whether this process still lives."""
    return f"{socket.gethostname()}:{os.getpid()}:{psutil.Process().create_time():.2f}"


def _owner_lives(owner: str) -> bool:
    """False only when it is certain: another host's process counts as alive."""
    host, pid, created = owner.rsplit(":", 2)
    if host != socket.gethostname():
        return True
    try:
        return bool(abs(psutil.Process(int(pid)).create_time() - float(created)) < 1)
    except psutil.NoSuchProcess:
        return False
