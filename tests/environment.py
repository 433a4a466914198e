"""The environment of a child process of a test: ours alone, whatever this process or an earlier test has set.

Importing `tasks` fills in DRAFTSMITH_HOME's neighbours (PREFECT_HOME and others) in the process that imports it; a
child that inherited them would work in another test's state root, but only when that other test ran first.
"""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_SETTLED_BY_US = ("DRAFTSMITH_", "PREFECT_", "MLFLOW_")


def child_environment(home: Path | None = None) -> dict[str, str]:
    """What this process inherited, less every variable that names a state root or a server; `home`: the child's own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_SETTLED_BY_US)}
    kept["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "hs_connectors" / "src")])
    return kept if home is None else {**kept, "DRAFTSMITH_HOME": str(home)}
