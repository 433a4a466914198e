"""A server that somebody else runs: who it is, and whether it captures what we want.

Such a server, started with our connector, publishes `engine.json` in the store of its records. That is the handshake:
the announcement says what the engine is and what it captures, and it is believed only while the server that answers is
the one that wrote it.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Annotated, Any

import httpx
from pydantic import AfterValidator, Field, ValidationError

from hs_connectors.contract import NORM_POINT, Reader
from hs_connectors.errors import ConnectorError
from hs_connectors.registry import BACKENDS, SHARED, added_names
from speculators_core.engine.metrics import parse_prometheus
from speculators_core.errors import ConfigError, EngineError
from speculators_core.types import StrictModel

_TIMEOUT_S = 10
_CLOCK_S = 5.0
"""Part of a second that two clocks of one machine may differ, with room to spare."""


def _known_backend(name: str) -> str:
    """The name; ValueError with the nearest where no backend has it."""
    if name in BACKENDS or name in (added := added_names()):
        return name
    known = sorted({*SHARED, *added})
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(
        f"no backend is called {name!r}; {hint}those by which an engine hands out states: {', '.join(known)}"
    )


BackendName = Annotated[str, AfterValidator(_known_backend)]
BACKEND_NAMES = f"{', '.join(SHARED)}, or one that another distribution adds to hs_connectors"
"""The values of a `BackendName`, for descriptions."""


class RecordStore(StrictModel):
    """Where a server puts its records: a backend of hs_connectors, as seen from this machine."""

    backend: BackendName = Field("file", description=f"what the server writes to: {BACKEND_NAMES}")
    config: dict[str, Any] = Field(description='its settings here; for "file": {root: a directory both can reach}')

    def reader(self) -> Reader:
        """Reads records and the announcement. ConfigError where the settings are wrong."""
        from hs_connectors.registry import open_reader

        try:
            return open_reader(self.backend, self.config)
        except ConnectorError as error:
            raise ConfigError(f"runtime.store: {error.what}", mend=error.mend) from error

    def describe(self) -> str:
        """For messages; settings may hold credentials, so only the place is shown."""
        return f"{self.backend}:{self.config.get('root', '')}"


class Announcement(StrictModel):
    """What `engine.json` holds; keys that we do not know are left out."""

    vllm: str = Field(description="version of vLLM")
    build: str = Field("unknown", description="distribution, and the commit where the build states one")
    device: str = Field(description="cpu, or type and name")
    model_runner: str = Field(description="v1 or v2")
    torch: str = Field("unknown", description="version of torch")
    transformers: str = Field("unknown", description="version of transformers")
    model: str = Field("", description="the verifier as the server was told it")
    max_model_len: int | None = Field(None, description="longest context in tokens")
    layer_ids: tuple[int, ...] = Field(description="captured layers")
    norm_point: str = Field("unknown", description="where the last layer's state is taken")
    states_dtype: str = Field(description="dtype of the states in the engine")
    codec: str = Field("none", description="how states are encoded on the way")
    verifier_fingerprint: str = Field(description="of the verifier, as the server was told it")
    started_at: float | None = Field(None, description="when the engine was ready to capture, seconds since 1970")

    @classmethod
    def read(cls, facts: Mapping[str, Any]) -> Announcement:
        """From engine.json's content. EngineError names the key that is missing or of another form."""
        try:
            return cls.model_validate({key: value for key, value in facts.items() if key in cls.model_fields})
        except ValidationError as error:
            key = ".".join(map(str, error.errors()[0]["loc"]))
            raise EngineError(
                f"engine.json does not say what this version wants to know ({key}: {error.errors()[0]['msg']})",
                mend="install the same draftsmith-hs-connectors in the server's environment and start it again",
            ) from error


class CaptureTerms(StrictModel):
    """What both sides must agree on before the first record."""

    layer_ids: tuple[int, ...] = Field(description="captured layers, ascending")
    norm_point: str = Field(NORM_POINT, description="where the last layer's state is taken")
    states_dtype: str = Field(description="dtype that the verifier runs in")
    codec: str = Field(description="how states are encoded on the way")
    verifier_fingerprint: str = Field(description="digest of the verifier")
    context: int | None = Field(
        None, description="tokens of the longest row, and one that is generated; null: rows are not known yet"
    )

    def differences(self, announced: Announcement) -> tuple[str, ...]:
        """Names of the terms that the server does not meet."""
        names = [
            name
            for name in ("layer_ids", "norm_point", "states_dtype", "codec", "verifier_fingerprint")
            if getattr(self, name) != getattr(announced, name)
        ]
        if (announced.max_model_len or 0) < (self.context or 0) and announced.max_model_len is not None:
            names.append("context")
        return tuple(names)

    def table(self, announced: Announcement) -> str:
        """Both sides, one term a line, those that differ marked."""
        theirs = announced.model_dump() | {"context": announced.max_model_len}
        different = self.differences(announced)
        lines = [("", "", "wanted", "the server")]
        for name, value in self.model_dump(exclude_none=True).items():
            mine = f"at least {value}" if name == "context" else _text(value)
            lines.append(("≠" if name in different else "", name, mine, _text(theirs[name])))
        widths = [max(len(line[column]) for line in lines) for column in range(4)]
        return "\n".join(
            "    " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        )


class Greeting(StrictModel):
    """How a server answered: its version, and its announcement or why there is none to believe."""

    version: str = Field(description="version of vLLM, from the server itself")
    announcement: Announcement | None = Field(description="engine.json, where it is this server's")
    silence: str = Field("", description="why there is no announcement")


def greet(url: str, store: RecordStore | None) -> Greeting:
    """Ask a server who it is.

    Raises:
        EngineError: nobody answers at the URL, or engine.json is of another form.
        ConfigError: the store's settings are wrong.
    """
    address = url.rstrip("/")
    try:
        answer = _get(address + "/version")
        version = str(answer.json()["version"])
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise EngineError(
            f"no vLLM server answers at {address}/version ({type(error).__name__}: {error})",
            mend="start the server, or correct the runtime's `url` (without /v1)",
        ) from error
    if store is None:
        return Greeting(version=version, announcement=None, silence="the recipe's runtime names no `store`")
    try:
        facts = store.reader().announcement()
    except ConnectorError as error:
        raise EngineError(f"the records' store cannot be read: {error.what}", mend=error.mend) from error
    if facts is None:
        silence = f"it published no engine.json in the records' store ({store.describe()})"
        return Greeting(version=version, announcement=None, silence=silence)
    announcement = Announcement.read(facts)
    silence = _another(announcement, version, address)
    return Greeting(version=version, announcement=None if silence else announcement, silence=silence)


def _another(announcement: Announcement, version: str, address: str) -> str:
    """Why the announcement is not that of the server which answers; "" when it may be."""
    if announcement.vllm != version:
        return f"engine.json in the records' store is of vLLM {announcement.vllm}, and {version} answers"
    started = _process_start(address)
    # an engine announces itself after its server's process has started
    if started is not None and announcement.started_at is not None and announcement.started_at < started - _CLOCK_S:
        return "engine.json in the records' store was written by a server that ran before this one"
    return ""


def _process_start(address: str) -> float | None:
    """When the server's process started, where it says so (with several API servers it does not)."""
    try:
        text = _get(address + "/metrics").text
    except httpx.HTTPError:
        return None
    return next((s.value for s in parse_prometheus(text) if s.name == "process_start_time_seconds"), None)


def _get(address: str) -> httpx.Response:
    response = httpx.get(address, timeout=_TIMEOUT_S, trust_env=False)  # as the client that will use it
    response.raise_for_status()
    return response


def _text(value: object) -> str:
    return json.dumps(value) if isinstance(value, (list, tuple)) else str(value)
