"""What vLLM's own loaders make of drafts that we wrote, without an engine: also of those that none serves on a CPU.

Key maps are so checked by a third party: vLLM knows the layouts of SafeAILab and z-lab by itself. Its module must hold
the same tensors after loading a foreign checkpoint and what we made of it; that the configs mean the same is what these
loaders build their modules from.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from speculators_core import registry
from speculators_core.convert import ConvertOptions, convert
from speculators_core.convert.source import Source
from speculators_core.engine.runtime import Runtime
from speculators_core.formats.card import ModelCard
from speculators_core.formats.directory import write_draft
from tests.engine.vllm_loads import digest
from tests.environment import child_environment
from tests.unit.speculators_core.algorithms.tiny import HIDDEN, VOCAB, vocabulary, write_verifier
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


BLOCKS = {"dflash": "dflash", "dflash2": "dflash", "dspark": "dspark"}
"""Algorithms whose drafts fill in blocks, and vLLM's method for them."""


@dataclass(frozen=True)
class Loads:
    """What vLLM held, by name: sha256 of each tensor; and our own drafts of blocks."""

    held: dict[str, dict[str, str]]
    drafts: dict[str, Path]


@pytest.fixture(scope="module")
def loads(runtime: Runtime, tmp_path_factory: pytest.TempPathFactory) -> Loads:
    """All of them, by one run of vLLM's interpreter."""
    root = tmp_path_factory.mktemp("loads")
    verifier = write_verifier(root / "verifier", head_dim=32)
    asked: list[dict[str, Any]] = []

    def ask(name: str, draft: Path, method: str) -> None:
        parallel = name.split()[0] in PARALLEL
        asked.append(
            {"name": name, "verifier": str(verifier), "draft": str(draft), "method": method, "tokens": 3}
            | {"parallel": parallel}
        )

    for name, (method, config, shapes, reduced) in CASES.items():
        tensors = {**foreign.filled(shapes), **(foreign.tables() if reduced else {})}
        theirs = foreign.write(root / name, config, tensors)
        ours = root / f"{name}-ours"
        convert(Source(theirs), ours, verifier, None, ConvertOptions())
        ask(f"{name} theirs", theirs, method)
        ask(f"{name} ours", ours, method)
    drafts = {name: drawn(name, verifier, root / f"our-{name}") for name in BLOCKS}
    for name, draft in drafts.items():
        ask(name, draft, BLOCKS[name])
    job = root / "job.json"
    job.write_text(json.dumps({"loads": asked, "result": str(root / "result.json")}))
    assert runtime.python is not None
    child = Path(__file__).with_name("vllm_loads.py")
    done = subprocess.run(
        [runtime.python, str(child), str(job)],
        env={**child_environment(), "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return Loads(json.loads((root / "result.json").read_text()), drafts)


def drawn(name: str, verifier: Path, target: Path) -> Path:
    """An exported draft of ours in which no two parameters are alike."""
    algorithm = registry.resolve(name)
    config = algorithm.config.model_validate({"layers": 2, "block_size": 4})
    model = algorithm.build(config, verifier, None if name == "dflash2" else vocabulary(), 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return write_draft(target, algorithm.export(config, model, str(verifier)), ModelCard(title=name))


@pytest.mark.parametrize("name", CASES)
def test_both_layouts_are_loaded_alike(loads: Loads, name: str) -> None:
    theirs, ours = loads.held[f"{name} theirs"], loads.held[f"{name} ours"]
    assert theirs.keys() == ours.keys()
    left_out = ("embed_tokens", *(() if CASES[name][3] else ("lm_head",)))  # shared from the verifier later
    different = sorted(key for key in theirs if theirs[key] != ours[key] and not any(k in key for k in left_out))
    assert not different


@pytest.mark.parametrize("name", BLOCKS)
def test_every_tensor_of_our_blocks_is_held_bit_for_bit(loads: Loads, name: str) -> None:
    held, stored = loads.held[name], load_file(loads.drafts[name] / "model.safetensors")
    stored.pop("t2d", None)  # vLLM needs one of the two tables
    told = {"draft_id_to_target_id": stored.pop("d2t")} if "d2t" in stored else {}
    told |= {"lm_head.weight": stored.pop("lm_head.weight")} if "lm_head.weight" in stored else {}
    for whole, parts in {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}.items():
        for first in [key for key in stored if f".{parts[0]}." in key]:
            together = [stored.pop(first.replace(parts[0], part)) for part in parts]
            told[f"model.{first.replace(parts[0], whole)}"] = torch.cat(together)
    told |= {f"model.{key}": tensor for key, tensor in stored.items()}
    assert not [key for key, tensor in told.items() if held[key] != digest(as_kept(key, tensor))]


def as_kept(key: str, tensor: torch.Tensor) -> torch.Tensor:
    """Vocabulary matrices get rows of zeros up to a multiple of 64; the confidence head is computed in float32."""
    if key in ("lm_head.weight", "model.markov_head.markov_w2.weight"):
        return functional.pad(tensor, (0, 0, 0, -len(tensor) % 64))
    return tensor.float() if "confidence_head" in key else tensor
