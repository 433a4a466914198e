"""Importing `tasks` settles Prefect's and MLflow's homes: here that is a directory of this session."""

from __future__ import annotations

import os
import tempfile

_home = tempfile.TemporaryDirectory(prefix="draftsmith-tests-", ignore_cleanup_errors=True)  # removed at exit
os.environ.setdefault("DRAFTSMITH_HOME", _home.name)
