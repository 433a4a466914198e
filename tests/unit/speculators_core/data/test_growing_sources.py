"""Sources that somebody writes to while a stage begins: no artifact bears the digest of other data than it holds."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from speculators_core.config import Recipe
from speculators_core.errors import DataError
from speculators_core.run import Run
from speculators_core.stages import prepare, regenerate
from speculators_core.store import Store
from tests.unit.speculators_core.test_state_keys import runtime


def talk(name: str) -> str:
    asked = {"role": "user", "content": f"why is {name} so?"}
    return json.dumps({"id": name, "messages": [asked, {"role": "assistant", "content": f"{name} is"}]}) + "\n"


@pytest.mark.parametrize("stage", [prepare, regenerate])
def test_sources_that_grow_while_a_stage_waits_make_no_artifact(
    tmp_path: Path, verifier: Path, monkeypatch: pytest.MonkeyPatch, stage: Callable[[Run], object]
) -> None:
    talks = tmp_path / "kept" / "talks.jsonl"
    talks.parent.mkdir()
    talks.write_text("".join(map(talk, "abcdefgh")))
    verifier = shutil.copytree(verifier, tmp_path / "verifier")
    save_file({"w": torch.zeros(1)}, verifier / "model.safetensors")
    content = {
        "name": "tiny", "deployment": "tiny", "verifier": {"path": str(verifier)},
        "runtime": runtime(tmp_path, "0.32.0"), "algorithm": {"kind": "eagle3", "aux_layers": [0, 1]},
        "data": {"sources": [str(talks.parent)], "evaluation_prompts": 1, "max_length": 32},
    }  # fmt: skip
    fly = Store.single_flight

    def slow_flight(store: Store, kind: str, digest: str) -> AbstractContextManager[None]:
        with talks.open("a") as file:  # as sampled traffic does, while this process waits for another
            file.write(talk("z"))
        return fly(store, kind, digest)

    run = Run(Recipe.model_validate(content), tmp_path / "home", check=False)
    with monkeypatch.context() as patch:
        patch.setattr(Store, "single_flight", slow_flight)
        with pytest.raises(DataError, match=r"kept changed while it was read\n  mend: run the same command again"):
            stage(run)
    assert not [*run.store.artifacts()]
    if stage is prepare:
        assert prepare(run).summary["conversations"] == 9
