"""What crosses from the engine to a reader: records, handles, and who may do what.

Pure: no vLLM, no I/O. Shape legend: T tokens · K captured layers · H hidden size.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, Protocol

from hs_connectors.errors import SettingsError

if TYPE_CHECKING:  # keeps the settings importable where torch is not wanted
    from torch import Tensor

CONNECTOR_NAME = "DraftsmithHiddenStates"
CPU_SCHEDULER = "hs_connectors.vllm.scheduler.CapturingScheduler"
"""Value for `--scheduler-cls` where an engine captures on a CPU."""
SETTINGS_KEY = "draftsmith"
NORM_POINT = "before the final norm"
"""Where the state of the last layer id is taken, in an engine's announcement."""
_KEY = re.compile(r"[A-Za-z0-9_-]{1,128}")
Payload = bytes | bytearray | memoryview
"""Bytes of a record; a backend that maps them hands out a view that outlives a delete."""


@dataclass(frozen=True, eq=False)
class Record:
    """One captured sequence.

    hidden_states [T, K, H] in `dtype`; entry k is the residual stream that enters decoder
    layer `layer_ids[k]` (0-based), so the number of layers names the stream after the last
    one, *before* the final norm · token_ids int64 [T], the tokens that went in ·
    layer_ids strictly ascending · dtype a torch name such as "bfloat16" ·
    verifier_fingerprint as the server was told it · extra: further facts as text
    (`request_id`, `prompt_tokens`).
    """

    hidden_states: Tensor
    token_ids: Tensor
    layer_ids: tuple[int, ...]
    dtype: str
    verifier_fingerprint: str
    extra: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Handle:
    """Address of a record: the backend that holds it and its key there.

    Raises SettingsError for a key that a backend would have to distrust: handles travel
    over HTTP, and a key names a file or an object.
    """

    backend: str
    key: str

    def __post_init__(self) -> None:
        """Refuse a hostile key."""
        check_key(self.key)

    def to_json(self) -> dict[str, str]:
        """As it travels in a response's `kv_transfer_params["handle"]`."""
        return {"backend": self.backend, "key": self.key}

    @classmethod
    def from_json(cls, value: object) -> Handle:
        """The handle in such a value; SettingsError when it is not one."""
        if not isinstance(value, Mapping) or set(value) != {"backend", "key"}:
            raise SettingsError(f"not a handle: {value!r}", mend="pass the response's kv_transfer_params['handle']")
        if not all(isinstance(part, str) for part in value.values()):
            raise SettingsError(f"not a handle: {value!r}")
        return cls(backend=value["backend"], key=value["key"])


@dataclass(frozen=True)
class Entry:
    """What a store says of one key without reading its payload.

    num_bytes of the payload, 0 for an error marker · modified_at: seconds since the epoch, by the store's clock.
    """

    key: str
    kind: Literal["record", "error"]
    num_bytes: int
    modified_at: float


class Backend(Protocol):
    """Moves payloads of bytes under keys; it knows nothing of what is inside them.

    One class a backend, built from its own configuration without side effects. Every
    method may be called from several threads at once.
    """

    name: str

    def prepare(self) -> None:
        """Make the store ready for writing and clear what killed writers left; StorageError if it cannot."""
        ...

    def publish(self, key: str, *pieces: Payload) -> None:
        """Make a payload, given in pieces, visible as one, whole or not at all; StorageError leaves nothing behind.

        A bounded store may wait a while for readers to make room: that is how it slows its writers. When this returns,
        the pieces' memory is the caller's again.
        """
        ...

    def fail(self, key: str, message: str) -> None:
        """Publish an error under the key, so that readers stop waiting. StorageError if even that fails."""
        ...

    def fetch(self, key: str, timeout_s: float) -> Payload:
        """Wait for the payload. CaptureFailed on an error marker, RecordTimeout after `timeout_s`.

        EntryError, at once, for what was not written here, RecordCorrupt where the store itself sees damage.
        """
        ...

    def discard(self, key: str) -> None:
        """Remove payload and error marker; silent when there is none, EntryError for what was not written here."""
        ...

    def entries(self) -> Iterator[Entry]:
        """Visible records and error markers, in any order; one key at most once, and none that is half written."""
        ...

    def announce(self, facts: Mapping[str, Any]) -> None:
        """Publish, atomically, what the writing engine is (JSON); replaces an earlier announcement."""
        ...

    def announcement(self) -> dict[str, Any] | None:
        """The last announcement, or None."""
        ...


class Writer(Protocol):
    """The engine's side: records into a backend."""

    def put(self, key: str, record: Record) -> Handle:
        """Check, pack and publish. RecordNotFinite or StorageError: nothing became visible."""
        ...

    def fail(self, key: str, message: str) -> None:
        """Publish an error marker, so that the reader stops waiting."""
        ...

    def announce(self, facts: Mapping[str, Any]) -> None:
        """Publish what the engine is: the handshake for runtimes that somebody else starts."""
        ...


class Reader(Protocol):
    """The consumer's side: records out of a backend."""

    def get(self, handle: Handle, timeout_s: float) -> Record:
        """Wait for a record and verify it. CaptureFailed, RecordTimeout, RecordCorrupt or RecordError."""
        ...

    def delete(self, handle: Handle) -> None:
        """Remove a record or its error marker; silent when there is none."""
        ...

    def announcement(self) -> dict[str, Any] | None:
        """What the engine said it is, or None before it has."""
        ...


@dataclass(frozen=True)
class CaptureSettings:
    """How one engine captures: all that the connector needs to be told.

    backend, backend_config   where records go; for "file": {"root": DIR}
    layer_ids                 strictly ascending; N (the number of layers) is the stream before the final norm
    verifier_fingerprint      copied into every record
    codec                     how hidden states are encoded ("none": as they are)
    writer_threads            threads that pack and write
    queue_bytes               most bytes waiting to be written; beyond it, finished requests keep their cache blocks
    drain_timeout_s           how long a stopping engine waits for its writers
    """

    backend: str
    backend_config: Mapping[str, Any]
    layer_ids: tuple[int, ...]
    verifier_fingerprint: str
    codec: str = "none"
    writer_threads: int = 2
    queue_bytes: int = 1 << 30
    drain_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        """Refuse layer ids that vLLM would label otherwise, and bounds that bound nothing."""
        ids = self.layer_ids
        if not ids or any(i < 0 for i in ids) or any(a >= b for a, b in pairwise(ids)):
            raise SettingsError(
                f"layer ids must be distinct, ascending and not negative, got {list(ids)}",
                mend="vLLM captures in ascending order and collapses repeats, so any other list would be mislabelled",
            )
        if self.writer_threads < 1 or self.queue_bytes < 1 or self.drain_timeout_s < 0:
            raise SettingsError(
                f"writer_threads and queue_bytes must be positive and drain_timeout_s not negative, got "
                f"{self.writer_threads}, {self.queue_bytes}, {self.drain_timeout_s}"
            )

    def to_json(self) -> dict[str, Any]:
        """As it travels in the server's flags."""
        return asdict(self) | {"layer_ids": list(self.layer_ids), "backend_config": dict(self.backend_config)}

    @classmethod
    def from_json(cls, value: object) -> CaptureSettings:
        """The settings in such a value; SettingsError names what is missing or unknown."""
        if not isinstance(value, Mapping):
            raise SettingsError(f"capture settings must be an object, got {value!r}")
        try:
            return cls(**(dict(value) | {"layer_ids": tuple(value.get("layer_ids", ()))}))
        except TypeError as error:
            raise SettingsError(f"capture settings: {error}") from error


def kv_transfer_config(settings: CaptureSettings) -> dict[str, Any]:
    """Value for the server's `--kv-transfer-config`."""
    return {
        "kv_connector": CONNECTOR_NAME,
        "kv_connector_module_path": "hs_connectors.vllm.connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {SETTINGS_KEY: settings.to_json()},
    }


def speculative_config(settings: CaptureSettings) -> dict[str, Any]:
    """Value for the server's `--speculative-config`: the method by which vLLM keeps states in its cache."""
    return {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(settings.layer_ids)}},
    }


def is_key(text: str) -> bool:
    """Whether it is a key: no dots, no slashes, at most 128 characters."""
    return _KEY.fullmatch(text) is not None


def check_key(key: str) -> str:
    """The key itself, when it is one; SettingsError otherwise."""
    if not is_key(key):
        raise SettingsError(f"not a record key: {key!r}", mend="keys are 1 to 128 of A-Z a-z 0-9 _ -; see safe_key()")
    return key


def size_of(pieces: Iterable[Payload]) -> int:
    """Bytes of a payload in pieces."""
    return sum(len(piece) for piece in pieces)


def safe_key(request_id: str) -> str:
    """A valid key that is distinct for distinct request ids, however hostile they are."""
    readable = re.sub(r"[^A-Za-z0-9_-]", "_", request_id)[:80]
    return f"{readable}-{hashlib.sha256(request_id.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"
