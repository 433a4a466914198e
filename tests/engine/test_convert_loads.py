"""Key maps checked by a third party: vLLM's own loaders read a foreign checkpoint and what we made of it alike.

vLLM knows the layouts of SafeAILab and z-lab by itself. Its module must hold the same tensors after loading either
directory; that the configs mean the same is what these loaders build their modules from. DeepSpec's is not among them:
vLLM refuses that method where there is no GPU.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from speculators_core.convert import ConvertOptions, convert
from speculators_core.convert.source import Source
from speculators_core.engine.runtime import Runtime
from tests.environment import child_environment
from tests.unit.speculators_core.algorithms.tiny import HIDDEN, VOCAB, write_verifier
from tests.unit.speculators_core.convert import foreign_drafts as foreign

pytestmark = pytest.mark.engine

CASES: dict[str, tuple[str, dict[str, Any], foreign.Shapes, bool]] = {
    # method, config.json, shapes, reduced vocabulary
    "safeai": ("eagle3", foreign.eagle3_config(), foreign.eagle3_shapes(), True),
    "safeai-norms": (
        "eagle3",
        foreign.eagle3_config(norm_output=True, norm_before_residual=True, fc_norm=True),
        {**foreign.eagle3_shapes(), **{f"fc_norm.{index}.weight": (HIDDEN,) for index in range(3)}},
        True,
    ),
    "peagle": (
        "eagle3",
        foreign.eagle3_config(num_hidden_layers=2, pard_token=VOCAB - 1),
        foreign.peagle_shapes(),
        True,
    ),
    "zlab": ("dflash", foreign.block_config(), foreign.block_shapes(), False),
}
PARALLEL = {"peagle"}


def test_vllm_loads_both_layouts_alike(runtime: Runtime, tmp_path: Path) -> None:
    verifier = write_verifier(tmp_path / "verifier", head_dim=32)
    loads = []
    for name, (method, config, shapes, reduced) in CASES.items():
        tensors = {**foreign.filled(shapes), **(foreign.tables() if reduced else {})}
        theirs = foreign.write(tmp_path / name, config, tensors)
        ours = tmp_path / f"{name}-ours"
        convert(Source(theirs), ours, verifier, None, ConvertOptions())
        for side, draft in (("theirs", theirs), ("ours", ours)):
            loads.append(
                {
                    "name": f"{name} {side}",
                    "verifier": str(verifier),
                    "draft": str(draft),
                    "method": method,
                    "tokens": 3,
                    "parallel": name in PARALLEL,
                }
            )
    job = tmp_path / "job.json"
    job.write_text(json.dumps({"loads": loads, "result": str(tmp_path / "result.json")}))
    assert runtime.python is not None
    child = Path(__file__).with_name("vllm_loads.py")
    done = subprocess.run(
        [runtime.python, str(child), str(job)],
        env={**child_environment(), "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "result.json").read_text())
    for name in CASES:
        theirs, ours = found[f"{name} theirs"], found[f"{name} ours"]
        assert theirs.keys() == ours.keys(), name
        left_out = ("embed_tokens", *(() if CASES[name][3] else ("lm_head",)))  # shared from the verifier later
        different = sorted(key for key in theirs if theirs[key] != ours[key] and not any(k in key for k in left_out))
        assert not different, (name, different)
