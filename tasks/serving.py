"""Serving a registered deployment: what the supervisor asks of the registry, and one supervisor for each name."""

from __future__ import annotations

import fcntl
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from speculators_core.engine.runtime import Runtime, RuntimeInfo
from speculators_core.errors import ConfigError, RegistryError, VerifierError
from speculators_core.lifecycle.matrix import cell_of
from speculators_core.lifecycle.promotion import CHAMPION, audit_log, forced_by, may_serve, settle
from speculators_core.locks import sign
from speculators_core.serving.config import ServeConfig
from speculators_core.serving.events import EventSink
from speculators_core.serving.fleet import Fleet
from speculators_core.serving.supervisor import Supervisor
from speculators_core.serving.version import ServedVersion
from speculators_core.store.manifest import sha256_file
from speculators_core.verifier.files import open_verifier
from tasks.adapters.settings import settings
from tasks.verifier_tags import REVISION_TAG, VERIFIER_TAG, template_kwargs_of
from tasks.versions import (
    check_pair,
    fetch_draft,
    no_such,
    open_aliases,
    require_version,
    rollback_model,
)

log = logging.getLogger(__name__)

_WHO = "draftsmith serve"


class RegistrySource:
    """Implements `VersionSource` over MLflow's registry, by the rules of `lifecycle.promotion`."""

    def __init__(
        self,
        model: str,
        alias: str,
        runtime: RuntimeInfo,
        *,
        verifier: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        """`verifier`: where the versions' verifier lies here, where that is not what they say.

        Raises:
            ConfigError: there is no such model. RegistryError: there is no registry yet.
        """
        self._model, self._alias, self._verifier = model, alias, verifier
        self._trust_remote_code = trust_remote_code
        self._home = settings().home
        self._runtime = runtime
        self._aliases = open_aliases(_WHO)
        self._settled: str | None = None
        if not self._aliases.versions(model):
            raise no_such(self._aliases, model)

    def wanted(self) -> str:
        """What the alias names; for the champion a move by other hands counts only into a proven cell."""
        named = self._aliases.get_alias(self._model, self._alias)
        if self._alias != CHAMPION:
            if named is None:
                raise ConfigError(f"{self._model} has no alias {self._alias}", mend="serve it without @alias")
            return named
        if named is not None and named == self._settled:
            return named
        settled = settle(
            self._aliases,
            self._model,
            runtime_key=self._runtime.key,
            fingerprint=None if named is None else self._fingerprint(named),
            home=self._home,
        )
        if settled.version is None:
            raise RegistryError(
                f"nothing of {self._model} serves yet{f': {settled.reason}' if named else ''}",
                mend="run `draftsmith retrain RECIPE`, or `draftsmith promote MODEL VERSION`",
            )
        if settled.news:
            log.warning("%s: %s", self._model, settled.reason)
        self._settled = settled.version
        return settled.version

    def admit(self, version: str) -> ServedVersion:
        """Fetch a version, and see that its draft, its verifier and its cell of the matrix are as they must be.

        A version that was promoted by force is let in against the gate's word, never with another verifier.
        """
        tags = require_version(self._aliases, self._model, version)
        forcer = forced_by(audit_log(self._home, self._model), version)
        found = check_pair(tags, self._model, version, verifier=self._verifier, must_match=True)
        allowed, reason = may_serve(tags, verifier_fingerprint=found, runtime_key=self._runtime.key)
        if not allowed and forcer is None:
            raise RegistryError(
                f"version {version} of {self._model} may not serve on vLLM {self._runtime.vllm}: {reason}"
                f" (it was measured on vLLM {tags.get('vllm.version', '-')})",
                mend=f"test it here first: `draftsmith matrix {self._model} --test {version} --recipe RECIPE`",
            )
        where = self._verifier or tags[VERIFIER_TAG]
        draft, _ = fetch_draft(settings(), tags, self._model, version)
        al = cell_of(tags, verifier_fingerprint=found, runtime_key=self._runtime.key).al
        return ServedVersion(
            model=self._model,
            version=version,
            verifier=open_verifier(where, revision=tags.get(REVISION_TAG), home=self._home).local(weights=True),
            verifier_fingerprint=found,
            template_kwargs=template_kwargs_of(tags, self._model, version),
            draft=draft,
            draft_files={path.name: sha256_file(path) for path in sorted(draft.iterdir()) if path.is_file()},
            al=al,
            forced_by=None if allowed else forcer,
            trust_remote_code=self._trust_remote_code,
        )

    def take_back(self, version: str, why: str) -> None:
        """Roll the champion back, where it still is this version; another alias is not ours to move."""
        if self._alias == CHAMPION and self._aliases.get_alias(self._model, CHAMPION) == version:
            rollback_model(self._model, why=why, version=version, who=_WHO)

    def _fingerprint(self, version: str) -> str | None:
        """Fingerprint of the version's verifier as it lies here; None where the version is gone."""
        try:
            tags = require_version(self._aliases, self._model, version)
        except ConfigError:
            return None
        try:
            return check_pair(tags, self._model, version, verifier=self._verifier, must_match=False)
        except VerifierError as error:
            log.warning("%s", error.what)
            return "gone"


def serve_model(source: RegistrySource, model: str, config: ServeConfig, runtime: Runtime, tell: EventSink) -> None:
    """Serve until interrupted.

    Raises:
        ConfigError: it is served already, the port is taken, there is no proxy. Others as `Supervisor.run`.
    """
    home = settings().home
    with sole_server(model):
        fleet = Fleet(config, runtime, home, home / "serving" / model)
        Supervisor(model, source, config, fleet, home, tell).run()


@contextmanager
def sole_server(model: str) -> Iterator[None]:
    """One supervisor of a name in a state root, by a lock that dies with its holder; ConfigError names the other."""
    path = settings().locks / f"serve-{model}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as holder:
        try:
            fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder.seek(0)
            raise ConfigError(
                f"{model} is served already, by process {holder.read()}",
                mend="stop that one, or serve from another DRAFTSMITH_HOME",
            ) from None
        sign(path)
        yield
