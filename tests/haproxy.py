"""Tests that need HAProxy: where it is not installed they are skipped, and say so."""

from __future__ import annotations

import pytest

from speculators_core.errors import ConfigError
from speculators_core.serving.proxy import find_haproxy


def _missing() -> str:
    try:
        find_haproxy()
    except ConfigError as error:
        return error.what
    return ""


needs_haproxy = pytest.mark.skipif(bool(_missing()), reason=_missing())
