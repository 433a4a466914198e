"""Records that nobody will read any more: their reader died between an engine's answer and the deletion."""

from __future__ import annotations

import logging
import time

from hs_connectors.errors import ConnectorError, EntryError
from hs_connectors.registry import open_backend
from speculators_core.engine.remote import RecordStore
from speculators_core.errors import CaptureError

log = logging.getLogger(__name__)


def sweep(store: RecordStore, lease_s: float) -> int:
    """Remove records and error markers that are older than a lease; returns how many.

    A reader takes a record seconds after it was written, so an old one is nobody's, whoever else reads from the store.
    What is none of its records stays, and is logged.

    Raises:
        CaptureError: the store cannot be read.
    """
    removed, oldest = 0, time.time() - lease_s
    try:
        backend = open_backend(store.backend, store.config)
        for entry in list(backend.entries()):
            if entry.modified_at < oldest:
                try:
                    backend.discard(entry.key)
                    removed += 1
                except EntryError as error:
                    log.warning("left in the records' store key=%s cause=%s", entry.key, error.what)
    except ConnectorError as error:
        raise CaptureError(f"the records' store cannot be swept: {error.what}", mend=error.mend) from error
    return removed
