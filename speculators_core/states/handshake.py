"""Before the first record: engine and capture agree, or one error shows both sides and how to start the server."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from urllib.parse import urlsplit

from hs_connectors.contract import Reader
from hs_connectors.errors import ConnectorError
from speculators_core.engine.config import ServerSpec, build_arguments
from speculators_core.engine.remote import Announcement, CaptureTerms, greet
from speculators_core.engine.runtime import Runtime
from speculators_core.engine.server import Engine
from speculators_core.errors import CaptureError, ConfigError
from speculators_core.states.collect import Collector
from speculators_core.states.config import CaptureConfig

_LOOPBACK = {"127.0.0.1", "localhost", "::1"}
_DRAIN_S = 30
"""How long a server that is told to stop may take to write what it owes."""


def terms_of(collector: Collector, config: CaptureConfig) -> CaptureTerms:
    """What a capture needs of an engine."""
    facts = collector.facts
    return CaptureTerms(
        layer_ids=facts.layer_ids,
        states_dtype=facts.dtype,
        codec=config.codec,
        verifier_fingerprint=facts.verifier_fingerprint,
        context=collector.longest + 1,
    )


def at_store(config: CaptureConfig, runtime: Runtime | None) -> CaptureConfig:
    """The capture's settings with the store of a server that somebody else runs; as they are for our own engines.

    Raises:
        ConfigError: a remote runtime without a store, or two places that say where records go.
    """
    if runtime is None or runtime.url is None:
        return config
    if runtime.store is None:
        raise ConfigError(
            f"the runtime at {runtime.url} names no `store`: it serves for evaluation only, nobody could read what it "
            "captures",
            mend="set runtime.store to a place that both can reach, e.g. "
            "{backend: file, config: {root: /shared/records}}, "
            "and start the server with what `draftsmith runtime flags RECIPE` prints",
        )
    if config.backend_config:
        raise ConfigError(
            "capture.backend_config and runtime.store both say where records go",
            mend="remove capture.backend_config: it is for engines that draftsmith starts itself",
        )
    store = runtime.store
    return config.model_copy(update={"backend": store.backend, "backend_config": dict(store.config)})


def server_command(spec: ServerSpec, url: str | None) -> list[str]:
    """The command by which somebody else starts such a server, to be reached at `url`."""
    address = urlsplit(url or "http://127.0.0.1:8000")
    host = "127.0.0.1" if address.hostname in _LOOPBACK else "0.0.0.0"
    if spec.kv_transfer is not None:
        spec = spec.model_copy(update={"extra_args": (*spec.extra_args, "--shutdown-timeout", str(_DRAIN_S))})
    return ["python", *build_arguments(spec, address.port or 80, host=host)]


def check_announcement(reader: Reader, terms: CaptureTerms, engine: Engine) -> None:
    """Compare what an engine that runs already said about itself with what is wanted.

    Raises:
        CaptureError: other layers, dtype, codec, verifier or context, or a remote engine that said nothing.
    """
    try:
        facts = reader.announcement()
    except ConnectorError as error:
        raise CaptureError(f"the records' store cannot be read: {error.what}", mend=error.mend) from error
    if facts is not None:
        _require(terms, Announcement.read(facts), engine.base_url, "restart it with the settings of this capture")
    elif engine.process is None:
        raise CaptureError(
            f"the server at {engine.base_url} published no engine.json in the records' store",
            mend="its owner must start it with our plugin and the same backend; else it serves for evaluation only",
        )


def shake_hands(runtime: Runtime, terms: CaptureTerms, command: Sequence[str]) -> Announcement:
    """Agree with a server that somebody else runs, before anything expensive.

    Args:
        command: how it would have to be started.

    Raises:
        CaptureError: it said nothing, or captures something else; the mend is the command.
        EngineError: it does not answer.
    """
    assert runtime.url is not None
    greeting = greet(runtime.url, runtime.store)
    mend = f"start it with\n    {shlex.join(command)}"
    if greeting.announcement is None:
        raise CaptureError(
            f"the server at {runtime.url} does not say what it captures: {greeting.silence}",
            mend=mend + "\n  as it runs now, it serves for evaluation only",
        )
    _require(terms, greeting.announcement, runtime.url, mend)
    return greeting.announcement


def _require(terms: CaptureTerms, announced: Announcement, where: str, mend: str) -> None:
    if different := terms.differences(announced):
        raise CaptureError(
            f"the server at {where} captures something else than is wanted: {', '.join(different)}\n"
            + terms.table(announced),
            mend=mend,
        )
