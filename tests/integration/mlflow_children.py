"""Work that tests run in processes of their own: `python mlflow_children.py NAME HOME ARGUMENTS…`."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def open_store(home: str) -> str:
    """Make a fresh store, all processes at the same moment."""
    from tasks.adapters.settings import read_settings
    from tasks.adapters.tracking import Tracking

    wait_for(Path(home) / "go")
    return Tracking(read_settings({"DRAFTSMITH_HOME": home})).experiment_id


def promote(home: str, model: str, version: str) -> str:
    """Promote over nothing; the loser is told so."""
    from speculators_core.errors import RegistryError
    from speculators_core.lifecycle.promotion import promote as move
    from tasks.adapters.aliases import MlflowAliases
    from tasks.adapters.settings import read_settings
    from tasks.adapters.tracking import Tracking

    aliases = MlflowAliases(Tracking(read_settings({"DRAFTSMITH_HOME": home})), actor=f"process {os.getpid()}")
    Path(home, f"ready-{version}").touch()
    wait_for(Path(home) / "go")
    try:
        move(
            aliases,
            model,
            version,
            expected=None,
            verifier_fingerprint="f" * 64,
            runtime_key="r" * 64,
            who="test",
            why="race",
            home=Path(home),
        )
    except RegistryError:
        return "lost"
    return "won"


def race(home: str, model: str, version: str, rounds: str) -> str:
    """Promote in models `<model>-0`, `-1`, … as soon as the other child is ready for the same one; who won, as JSON."""
    from speculators_core.errors import RegistryError
    from speculators_core.lifecycle.promotion import promote as move
    from tasks.adapters.aliases import MlflowAliases
    from tasks.adapters.settings import read_settings
    from tasks.adapters.tracking import Tracking

    aliases = MlflowAliases(Tracking(read_settings({"DRAFTSMITH_HOME": home})), actor=f"process {os.getpid()}")
    other = "2" if version == "1" else "1"
    outcomes = []
    for number in range(int(rounds)):
        Path(home, f"ready-{number}-{version}").touch()
        wait_for(Path(home, f"ready-{number}-{other}"), poll_s=0.0005)
        pair = {"verifier_fingerprint": "f" * 64, "runtime_key": "r" * 64}
        try:
            move(aliases, f"{model}-{number}", version, expected=None, who=version, why="race", home=Path(home), **pair)
            outcomes.append("won")
        except RegistryError as error:
            outcomes.append("lost" if f"is version {other}, not none" in error.what else error.what)
    return json.dumps(outcomes)


def stay_in_stage(home: str, parent: str) -> str:
    """Open a stage's run and wait to be killed."""
    from tasks.adapters.settings import read_settings
    from tasks.adapters.tracking import Tracking

    with Tracking(read_settings({"DRAFTSMITH_HOME": home})).stage(parent, "train", tags={}) as run:
        Path(home, "in-stage").write_text(run.run_id)
        time.sleep(60)
    return "not killed"


def wait_for(path: Path, poll_s: float = 0.005) -> None:
    """Until the file is there."""
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(poll_s)


if __name__ == "__main__":
    print(globals()[sys.argv[1]](*sys.argv[2:]))
