"""The real vLLM loads every shape of draft that we write, given the draft's directory alone, and drafts with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from speculators_core.algorithms.eagle3.build import build
from speculators_core.algorithms.eagle3.config import Eagle3Config
from speculators_core.algorithms.eagle3.export import export
from speculators_core.engine.client import GenerationRequest
from speculators_core.engine.config import ServerSpec
from speculators_core.engine.server import Engine
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
}


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
    config = Eagle3Config(**knobs)
    vocabulary = every_nth(draft_size, 49152) if draft_size else None
    model = build(config, verifier_dir, vocabulary, seed=0)  # type: ignore[arg-type]
    draft = write_draft(tmp_path / "draft", export(config, model, str(verifier_dir)), ModelCard(title=shape))
    server = engine(ServerSpec(model=str(draft), max_model_len=256, max_num_seqs=4, kv_cache_gib=1.0))
    with server.client() as client:
        before = client.counters()
        request = GenerationRequest(id="one", prompt_token_ids=(1, 504, 260), max_tokens=12, ignore_eos=True)
        (answer,) = list(client.generate([request], concurrency=1))
        after = client.counters()
    assert len(answer.token_ids) == 12
    drafts = after.drafts - before.drafts
    assert drafts > 0
    assert after.draft_tokens - before.draft_tokens == drafts * config.drafted_tokens
