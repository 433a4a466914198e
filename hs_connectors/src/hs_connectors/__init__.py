"""Hidden states from vLLM to a reader, record by record.

Two sides meet here: a KV connector inside the engine (`hs_connectors.vllm`) that writes
records, and a reader in another process. Both see `Record`, `Handle` and a backend's name.
"""

from __future__ import annotations

from hs_connectors.contract import (
    Backend,
    CaptureSettings,
    Handle,
    Reader,
    Record,
    Writer,
    kv_transfer_config,
    safe_key,
    speculative_config,
)
from hs_connectors.registry import BACKENDS, open_backend, open_reader, open_writer

__all__ = [
    "BACKENDS",
    "Backend",
    "CaptureSettings",
    "Handle",
    "Reader",
    "Record",
    "Writer",
    "kv_transfer_config",
    "open_backend",
    "open_reader",
    "open_writer",
    "safe_key",
    "speculative_config",
]
