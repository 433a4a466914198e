"""The real vLLM loads every shape of draft that we write, given the draft's directory alone, and drafts with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from speculators_core import registry
from speculators_core.engine.client import GenerationRequest
from speculators_core.engine.config import ServerSpec
from speculators_core.engine.server import Engine
from speculators_core.evaluation.served import drafted_tokens
from speculators_core.formats.card import ModelCard
from speculators_core.formats.directory import write_draft
from tests.unit.speculators_core.algorithms.tiny import Vocabulary

pytestmark = pytest.mark.engine

SHAPES: dict[str, dict[str, Any]] = {
    "default-reduced": {"draft_size": 4096},
    "qwen3-two-layers-fc-norm": {
        "style": "qwen3",
        "layers": 2,
        "norm_before_fc": False,
        "fc_norm": True,
        "norm_output": False,
    },
    "llama-four-features-two-layers": {
        "aux_layers": (1, 9, 20, 28),
        "layers": 2,
        "norm_before_residual": False,
        "sliding_window": None,
        "speculative_tokens": 2,
        "draft_size": 4096,
    },
    "in-parallel-qwen3-two-layers-fc-norm": {
        "kind": "peagle",
        "style": "qwen3",
        "layers": 2,
        "norm_before_fc": False,
        "fc_norm": True,
        "num_depths": 5,
        "speculative_tokens": 4,
        "draft_size": 4096,
    },
    "in-blocks-two-layers-own-mask": {"kind": "dflash", "layers": 2, "block_size": 5, "draft_size": 4096},
}
"""Knobs of a draft (eagle3 unless its kind is named), and the size of its vocabulary."""


def every_nth(draft_size: int, verifier_size: int) -> Vocabulary:
    ids = torch.arange(draft_size) * (verifier_size // draft_size)
    t2d = torch.zeros(verifier_size, dtype=torch.bool)
    t2d[ids] = True
    return Vocabulary(ids - torch.arange(draft_size), t2d)


@pytest.mark.parametrize("shape", SHAPES)
def test_an_untrained_draft_is_served_alone(
    shape: str, engine: Callable[[ServerSpec], Engine], verifier_dir: Path, tmp_path: Path
) -> None:
    knobs = dict(SHAPES[shape])
    draft_size = knobs.pop("draft_size", None)
    algorithm = registry.resolve(knobs.get("kind", "eagle3"))
    config = algorithm.config(**knobs)
    vocabulary = every_nth(draft_size, 49152) if draft_size else None
    model = algorithm.build(config, verifier_dir, vocabulary, 0)
    exported = algorithm.export(config, model, str(verifier_dir))
    draft = write_draft(tmp_path / "draft", exported, ModelCard(title=shape))
    server = engine(ServerSpec(model=str(draft), max_model_len=256, max_num_seqs=4, kv_cache_gib=1.0))
    with server.client() as client:
        before = client.counters()
        request = GenerationRequest(id="one", prompt_token_ids=(1, 504, 260), max_tokens=12, ignore_eos=True)
        (answer,) = list(client.generate([request], concurrency=1))
        after = client.counters()
    assert len(answer.token_ids) == 12
    drafts = after.drafts - before.drafts
    assert drafts > 0
    assert after.draft_tokens - before.draft_tokens == drafts * drafted_tokens(draft)
