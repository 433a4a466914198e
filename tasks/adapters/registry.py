"""Drafts in MLflow's model registry: one registered model for each deployment, one version for each draft that is
tied to one verifier and one runtime.

    register    uploads a draft as a LoggedModel of plain files, verifies what arrived, then makes a version of it;
                the same draft for the same verifier and runtime is the same version, however often it is registered
    download    a version's draft, by its immutable number, verified file by file

Aliases are in aliases.py.
"""

from __future__ import annotations

import errno
import logging
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlparse
from urllib.request import url2pathname

import mlflow
from mlflow.entities import LoggedModel, LoggedModelOutput, LoggedModelStatus
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from pydantic import Field

from speculators_core.errors import RegistryError
from speculators_core.lifecycle.promotion import FINGERPRINT_TAG, GATE_TAG, RUNTIME_TAG
from speculators_core.locks import named_lock
from speculators_core.store.manifest import MANIFEST_NAME, Manifest, sha256_file
from speculators_core.types import StrictModel
from tasks.adapters.redaction import redact
from tasks.adapters.tracking import Tracking, every, mlflow_errors, stage_files

log = logging.getLogger(__name__)

MODEL_TYPE = "draft"
MODEL_ID_TAG = "model.id"
DRAFT_TAG = "draft.digest"
_FIRST_COUNTS = frozenset({"prefect.flow_run_id", "mlflow.parent_run_id"})  # who made it, not who looked last


class VersionFacts(StrictModel):
    """What a version says about itself; each field is a tag of the name given in `tags`."""

    draft_digest: str = Field(description="digest of the draft's manifest: which bytes")
    verifier_name: str = Field(description="name of the verifier: a hub id, or its directory's name")
    verifier_revision: str | None = Field(None, description="revision of the verifier, where there is one")
    verifier_uri: str = Field(description="where the verifier lies: promotion rolls the pair")
    verifier_fingerprint: str = Field(description="digest of what makes a draft stale")
    tokenizer_sha256: str = Field(description="digest of the tokenizer's files")
    chat_template_sha256: str = Field(description="digest of the chat template with its settings")
    vllm_version: str = Field(description="version of the vLLM that measured it")
    runtime_key: str = Field(description="digest of vLLM version, build, device and model runner")
    algorithm: str
    k: int = Field(ge=1, description="drafted tokens at which the acceptance length holds")
    measured_by: str = Field("engine", description="what counted it: the engine, or the reference loop")
    al: float | None = Field(None, description="acceptance length")
    al_low: float | None = Field(None, description="lower end of its 95 % interval")
    gate_outcome: str | None = Field(None, description="pass, fail or inconclusive; None: the gate hasn't looked")
    prefect_flow_run_id: str | None = Field(None, description="the Prefect run that registers it")
    mlflow_run_id: str | None = Field(None, description="the parent run in MLflow")
    extra: dict[str, str] = Field(default_factory=dict, description="further tags")

    def tags(self) -> dict[str, str]:
        """Registry tags; facts that are not known are left out."""
        known = {
            DRAFT_TAG: self.draft_digest,
            "verifier.name": self.verifier_name,
            "verifier.revision": self.verifier_revision,
            "verifier.uri": self.verifier_uri,
            FINGERPRINT_TAG: self.verifier_fingerprint,
            "tokenizer.sha256": self.tokenizer_sha256,
            "chat_template.sha256": self.chat_template_sha256,
            "vllm.version": self.vllm_version,
            RUNTIME_TAG: self.runtime_key,
            "algorithm": self.algorithm,
            "k": str(self.k),
            "measured_by": self.measured_by,
            "al": None if self.al is None else f"{self.al:.4f}",
            "al.low": None if self.al_low is None else f"{self.al_low:.4f}",
            GATE_TAG: self.gate_outcome,
            "prefect.flow_run_id": self.prefect_flow_run_id,
            "mlflow.parent_run_id": self.mlflow_run_id,
            **self.extra,
        }
        return {name: redact(value) for name, value in known.items() if value is not None}


class RegisteredDraft(StrictModel):
    """A version of a deployment's registered model."""

    model: str
    version: str
    model_id: str
    draft_digest: str
    created: bool = Field(description="False: it was registered before, and its tags were merged")


@contextmanager
def draft_is_kept(draft: Path, retry_hint: str) -> Iterator[None]:
    """Adds to a RegistryError where the draft lies and how to register it alone, later.

    For everything between a finished draft and its version, opening MLflow included.
    """
    try:
        yield
    except RegistryError as error:
        kept = f"the draft is kept in {draft}; register it alone, later, with `{retry_hint}`"
        raise RegistryError(error.what, mend=f"{error.mend}; {kept}" if error.mend else kept) from error


class DraftRegistry:
    """Registers and fetches drafts; every method raises RegistryError when MLflow refuses or is away."""

    def __init__(self, tracking: Tracking) -> None:
        """Uses the tracking store's registry."""
        self._tracking = tracking
        self._client = tracking.client
        self._uri = tracking.uri

    def register(
        self, deployment: str, draft: Path, manifest: Path, facts: VersionFacts, *, run_id: str, retry_hint: str
    ) -> RegisteredDraft:
        """Make sure that the draft is a version of the deployment's model.

        Args:
            deployment: the registered model's name.
            draft: directory of config.json, model.safetensors, README.md.
            manifest: the artifact's manifest.json; uploaded beside the draft's files, which must match it.
            facts: becomes the version's tags.
            run_id: the MLflow run that the LoggedModel hangs on.
            retry_hint: the command that registers this draft again, for the error when MLflow is away.

        Raises:
            RegistryError: the draft doesn't match its manifest; or MLflow is away or lost bytes. The draft stays where
                it is, and registering again continues from what arrived whole.
        """
        expected = self._read_manifest(manifest, facts.draft_digest)
        verify_files(draft, expected, where=str(draft))
        tags = facts.tags() | {"manifest.sha256": sha256_file(manifest)}
        locks = self._tracking.settings.locks
        with (
            draft_is_kept(draft, retry_hint),
            mlflow_errors("register the draft", self._uri),
            named_lock(locks, f"registry-{deployment}"),
        ):
            self._ensure_model(deployment)
            found = self._find_version(deployment, facts)
            if found is not None:
                for name, value in tags.items():
                    if found.tags.get(name) != value and not (name in _FIRST_COUNTS and name in found.tags):
                        self._client.set_model_version_tag(deployment, found.version, name, value)
                return self._result(deployment, found, facts.draft_digest, created=False)
            with named_lock(locks, f"upload-{facts.draft_digest}", timeout_s=3600):
                model = self._whole_model(expected, facts.draft_digest) or self._upload(draft, manifest, facts, run_id)
            self._require_whole(model, expected)
            version = self._client.create_model_version(
                deployment,
                source=f"models:/{model.model_id}",
                run_id=run_id,
                tags={**tags, MODEL_ID_TAG: model.model_id},
                model_id=model.model_id,
            )
            log.info("registered %s version %s", deployment, version.version)
            return self._result(deployment, version, facts.draft_digest, created=True)

    def download(self, deployment: str, version: str, target: Path) -> Path:
        """Fetch a version's draft into `target` (config.json, model.safetensors, …; no manifest), verified.

        `version` is a number, never an alias. The directory appears whole or not at all; one that is there already is
        verified again and kept.

        Raises:
            RegistryError: no such version, MLflow away, or bytes that don't match the version's manifest.
        """
        with mlflow_errors(f"fetch {deployment} version {version}", self._uri):
            found = self._client.get_model_version(deployment, version)
        digest = found.tags.get(DRAFT_TAG)
        model_id = found.tags.get(MODEL_ID_TAG)
        if digest is None or model_id is None:
            raise RegistryError(f"{deployment} version {version} was not registered by draftsmith: it has no digest")
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
            with mlflow_errors(f"fetch {deployment} version {version}", self._uri):
                fetched = Path(mlflow.artifacts.download_artifacts(f"models:/{model_id}", dst_path=scratch))
            manifest = self._read_manifest(fetched / MANIFEST_NAME, digest)
            verify_files(fetched, manifest, where=f"{deployment} version {version}")
            draft = Path(scratch) / f"whole-{uuid.uuid4().hex}"
            for entry in manifest.files:
                (draft / entry.path).parent.mkdir(parents=True, exist_ok=True)
                shutil.move(fetched / entry.path, draft / entry.path)
            try:
                draft.replace(target)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                verify_files(target, manifest, where=str(target))  # fetched before, or by a faster process meanwhile
        return target

    def whole(self, deployment: str, version: str) -> bool:
        """Whether a version's uploaded files still match its manifest."""
        with tempfile.TemporaryDirectory(prefix="draftsmith-verify-") as scratch:
            try:
                self.download(deployment, version, Path(scratch) / "draft")
            except RegistryError as error:
                log.warning("%s", error.what)
                return False
        return True

    def _ensure_model(self, deployment: str) -> None:
        try:
            self._client.get_registered_model(deployment)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            try:
                self._client.create_registered_model(deployment, tags={"draftsmith.deployment": deployment})
            except MlflowException as race:  # another host was faster
                if race.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise

    def _find_version(self, deployment: str, facts: VersionFacts) -> ModelVersion | None:
        query = f"name = '{deployment}' and tag.`{DRAFT_TAG}` = '{facts.draft_digest}'"
        same = [
            version
            for version in every(lambda token: self._client.search_model_versions(query, page_token=token))
            if version.tags.get(FINGERPRINT_TAG) == facts.verifier_fingerprint
            and version.tags.get(RUNTIME_TAG) == facts.runtime_key
        ]
        return min(same, key=lambda version: int(version.version), default=None)

    def _upload(self, draft: Path, manifest: Path, facts: VersionFacts, run_id: str) -> LoggedModel:
        """A new LoggedModel with these files: READY when all arrived, FAILED otherwise."""
        model = self._client.create_logged_model(
            self._tracking.experiment_id,
            name=f"draft-{facts.algorithm}",
            source_run_id=run_id,
            tags={DRAFT_TAG: facts.draft_digest},
            model_type=MODEL_TYPE,
        )
        try:
            with tempfile.TemporaryDirectory(prefix="draftsmith-upload-") as staging:
                stage_files(draft, Path(staging), allow_text=None)
                stage_files(manifest, Path(staging), allow_text=None)
                self._client.log_model_artifacts(model.model_id, staging)
            self._require_whole(model, Manifest.parse(manifest.read_bytes(), str(manifest)))
        except Exception:
            self._discard(model)
            raise
        finished = self._client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)
        self._client.log_outputs(run_id, [LoggedModelOutput(finished.model_id, step=0)])
        return finished

    def _discard(self, model: LoggedModel) -> None:
        try:
            self._client.finalize_logged_model(model.model_id, LoggedModelStatus.FAILED)
        except (MlflowException, OSError) as error:
            log.warning("the incomplete upload %s could not be marked: %s", model.model_id, redact(str(error))[:200])

    def _whole_model(self, expected: Manifest, digest: str) -> LoggedModel | None:
        """A finished, whole upload of this draft: what an earlier attempt or another deployment left."""
        experiments, query = [self._tracking.experiment_id], f"tags.`{DRAFT_TAG}` = '{digest}'"
        candidates = every(
            lambda token: self._client.search_logged_models(experiments, filter_string=query, page_token=token)
        )
        for model in candidates:
            if model.status == LoggedModelStatus.PENDING and self._tracking.settings.sqlite_file is not None:
                self._discard(model)  # we hold the upload's lock: whoever began it is dead
            if model.status != LoggedModelStatus.READY:
                continue
            try:
                self._require_whole(model, expected)
            except RegistryError as error:
                log.warning("%s; it is uploaded again", error.what)
                continue
            return model
        return None

    def _require_whole(self, model: LoggedModel, expected: Manifest) -> None:
        """Read back what was uploaded: where it lies when that is a local path, else through a download."""
        where = f"upload {model.model_id}"
        parsed = urlparse(model.artifact_location)
        if parsed.scheme in ("", "file"):
            verify_files(Path(url2pathname(parsed.path)), expected, where=where)
            return
        with tempfile.TemporaryDirectory(prefix="draftsmith-verify-") as scratch:
            fetched = mlflow.artifacts.download_artifacts(f"models:/{model.model_id}", dst_path=scratch)
            verify_files(Path(fetched), expected, where=where)

    @staticmethod
    def _read_manifest(path: Path, digest: str) -> Manifest:
        if not path.is_file():
            raise RegistryError(f"there is no manifest at {path}", mend="export the draft again")
        manifest = Manifest.parse(path.read_bytes(), str(path))
        if manifest.digest != digest:
            raise RegistryError(
                f"the manifest at {path} is of draft {manifest.digest[:12]}, not {digest[:12]}",
                mend="export the draft again",
            )
        return manifest

    @staticmethod
    def _result(deployment: str, version: ModelVersion, digest: str, *, created: bool) -> RegisteredDraft:
        tags: Mapping[str, Any] = version.tags
        return RegisteredDraft(
            model=deployment,
            version=str(version.version),
            model_id=str(tags.get(MODEL_ID_TAG, "")),
            draft_digest=digest,
            created=created,
        )


def verify_files(directory: Path, manifest: Manifest, *, where: str) -> None:
    """Every file of the manifest is there with its size and sha256.

    Raises:
        RegistryError: naming the first file that isn't.
    """
    for entry in manifest.files:
        path = directory / entry.path
        if not path.is_file():
            raise RegistryError(f"{where} lacks {entry.path}", mend="export or register the draft again")
        if path.stat().st_size != entry.size or sha256_file(path) != entry.sha256:
            raise RegistryError(
                f"{where}: {entry.path} does not match its manifest", mend="export or register the draft again"
            )
